"""
The published recipe for ISOPO's non-interacting update, with module hooks: what the benchmarks compare with.

Written from the paper (arXiv 2512.23353), rule `c_s = A_s / F_s`. Each sequence's gradient at every trained linear
layer is formed during the backward pass, in its dtype, and kept until it ends; the plain weight gradients, which that
pass computes too, are thrown away. Linear layers only: TRL's fused LM head never calls `lm_head`, and embeddings and
norms have no recipe, so these keep the plain gradient of the loss, which has the sign of the advantages only. Not for
gradient checkpointing, where hooks fire twice.
"""

import torch
from torch import nn
from trl import GRPOTrainer


SAMPLES = 250  # as in the author's code


class HookRecipe:
    """Hooks on every trained linear layer of `model`; `begin` before the forward, `finish` after the backward."""

    def __init__(self, model: nn.Module, samples: int = SAMPLES):
        self.samples = samples
        self.generator = torch.Generator().manual_seed(0)
        self.inputs: dict[nn.Linear, torch.Tensor] = {}
        self.kept: dict[nn.Linear, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        for module in model.modules():
            if isinstance(module, nn.Linear) and module.weight.requires_grad:
                module.register_forward_hook(self._keep_input)
                module.register_full_backward_hook(self._keep_gradients)

    def begin(self, attention_mask: torch.Tensor) -> None:
        """Draw the Fisher samples from the real positions of a microbatch, `[m, T]`."""
        real = attention_mask.flatten().nonzero().squeeze(1)
        drawn = torch.randperm(len(real), generator=self.generator)[: self.samples]
        self.positions = real[drawn.to(real.device)]

    def _keep_input(self, module, args, output):
        if torch.is_grad_enabled():
            self.inputs[module] = args[0].detach()

    def _keep_gradients(self, module, grad_input, grad_output):
        g = grad_output[0]  # [m, T, p]
        a = self.inputs.pop(module).to(g.dtype)  # [m, T, d]
        V = torch.einsum("mtp,mtd->mpd", g, a)
        self.kept[module] = (V, g.flatten(0, 1)[self.positions], a.flatten(0, 1)[self.positions])

    @torch.no_grad()
    def finish(self, advantages: torch.Tensor) -> None:
        """Replace the weight gradients by `sum_s A_s / F_s V_s`; a sequence without a gradient stays without one."""
        for module, (V, g, a) in self.kept.items():
            wide = torch.promote_types(g.dtype, torch.float32)
            overlap = (torch.einsum("mpd,jd->mjp", V, a) * g).sum(2, dtype=wide)
            total = (g.to(wide).square().sum(1) * a.to(wide).square().sum(1)).sum()
            F = (overlap.square().sum(1) / total).sqrt()
            c = torch.where(F > 0, advantages.to(F.dtype) / F, 0)
            module.weight.grad = torch.einsum("m,mpd->pd", c.to(V.dtype), V).to(module.weight.dtype)
        self.kept.clear()


class RecipeTrainer(GRPOTrainer):
    """TRL's trainer with the hooks on its model; call `finish` after each backward."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.recipe = HookRecipe(self.model)

    def _compute_loss(self, model, inputs):
        self.recipe.begin(torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1))
        self.size = inputs["advantages"].abs()
        sign = torch.where(inputs["advantages"] < 0, -1.0, 1.0)  # the size comes in with the coefficients
        return super()._compute_loss(model, {**inputs, "advantages": sign})

    def finish(self):
        self.recipe.finish(self.size)
