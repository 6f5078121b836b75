r"""
Figures of a step that say something of its gradients, from what the layers have entered in their ledgers.

The step's gradient is `U = sum_s X_s` over its m sequences, `X_s = c_s V_s`. If the `X_s` are independent, with
mean `mu` and covariance `Sigma`, then with `S = sum_s |X_s|^2`

    E[|U|^2] = m^2 |mu|^2 + m tr(Sigma),    E[S] = m |mu|^2 + m tr(Sigma)

so that `(|U|^2 - S) / (m (m - 1))` and `(m S - |U|^2) / (m (m - 1))` estimate `|mu|^2` and `tr(Sigma)` without bias.
The simple noise scale of McCandlish et al. (arXiv 1812.06162) is `tr(Sigma) / |mu|^2`, in sequences; as there, both
are averaged over steps before they are divided.
"""

import torch

from ..geometry.guarded import ratio
from .ledger import Ledger
from .rule import Rule


_STEP = ("squares", "sequences")  # S and m
_COSINES = ("of one prompt", "pairs of one prompt", "of others", "pairs of others")


class Diagnostics:
    """
    Sums of a step's diagnostics, as far as its rule has statistics for them.

    Args:
        rule ([`Rule`]): the rule.
        decay (`float`): weight of the past in the noise scale, per step.
        parts (`list[str]`): what part of the model each layer is, by which Fisher lengths are told apart.
        like (`torch.Tensor`): a tensor of the device and type of the sums.

    Attributes:
        sums (`torch.Tensor`): of this rank's microbatches since the step began, flat.
        moments (`torch.Tensor`): `[3]`, running means of `tr(Sigma)` and `|mu|^2`, and 1 where there are any.
    """

    def __init__(self, rule: Rule, decay: float, parts: list[str], like: torch.Tensor):
        self._rule, self._decay = rule, decay
        self._parts = list(dict.fromkeys(parts)) if rule.needs.overlap else []
        numbers = torch.tensor([self._parts.index(part) for part in parts if part in self._parts], dtype=torch.long)
        self._member = torch.nn.functional.one_hot(numbers, max(len(self._parts), 1)).to(like)  # [L, parts]
        self.moments = like.new_zeros(3)
        self._size = len(self._parts) + len(_STEP) + len(_COSINES)
        self.sums = like.new_zeros(self._size)
        self._only_of_loss = True

    @property
    def has_norms(self) -> bool:
        """Whether the rule computes `N_s`."""
        return self._rule.needs.norm or self._rule.needs.ntk

    def start_step(self) -> None:
        self.sums = self.sums.new_zeros(self._size)
        self._only_of_loss = True

    def add(self, ledger: Ledger, alive: torch.Tensor) -> None:
        """Take in one microbatch; `alive` `[L, m]`: the sequences that count at a layer."""
        c, fisher, norm = ledger.table[:, :3].unbind(1)
        parts = []
        if self._parts:
            parts.append(torch.where(alive, c.abs() * fisher, 0).sum(1) @ self._member)
        squares = c.new_zeros(())
        if self.has_norms:
            squares = torch.where(alive, (c * norm).square(), 0).sum() * ledger.loss_scale**2
        # A sequence that only fills in has the sign 0
        counts = torch.ones_like(ledger.advantages) if ledger.signs is None else ledger.signs != 0
        parts += [squares.unsqueeze(0), counts.sum().to(squares).unsqueeze(0)]
        if ledger.ntk is not None and ledger.prompts is not None:
            parts.append(pair_cosines(ledger.ntk, alive, ledger.prompts, ledger.signs))
        else:
            parts.append(squares.new_zeros(len(_COSINES)))
        self.sums = self.sums + torch.cat(parts)
        self._only_of_loss = self._only_of_loss and not ledger.beside_terms

    def sequences_of(self, sums: torch.Tensor) -> torch.Tensor:
        """How many sequences counted; `sums` as in [`figures`]."""
        return sums[len(self._parts) + _STEP.index("sequences")]

    def figures(self, sums: torch.Tensor, grad_norm: torch.Tensor | None, ranks: int) -> dict[str, torch.Tensor]:
        """
        The step's figures, of `sums` that all ranks have added up, and of the norm of the gradient, which is the mean
        over `ranks`; NaN where one is not defined.
        """
        lengths, (squares, m), (own, own_pairs, others, other_pairs) = sums.split(
            [len(self._parts), len(_STEP), len(_COSINES)]
        )
        shares = ratio(lengths, lengths.sum())
        figures = {f"share_{part}": share for part, share in zip(self._parts, shares.unbind(), strict=True)}
        if self.has_norms and grad_norm is not None and self._only_of_loss:
            figures["noise_scale"] = self._noise_scale(grad_norm.detach().to(sums).square(), squares / ranks**2, m)
        if self._rule.needs.ntk:
            # 0 / 0 is NaN
            figures |= {"cosine_same_prompt": own / own_pairs, "cosine_other_prompts": others / other_pairs}
        return figures

    def _noise_scale(self, square: torch.Tensor, squares: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        """From `|U|^2`, `S` and the number of sequences; takes the step into the running means."""
        estimates = torch.stack([m * squares - square, square - squares]) / (m * (m - 1)).clamp(min=1)
        usable = (m > 1) & estimates.isfinite().all()
        decay = self._decay * self.moments[2]  # a first mean has no past
        updated = decay * self.moments[:2] + (1 - decay) * estimates
        self.moments = torch.where(usable, torch.cat([updated, torch.ones_like(updated[:1])]), self.moments)
        trace, signal = self.moments[:2].unbind()
        return torch.where(signal > 0, trace / torch.where(signal > 0, signal, 1), torch.nan)


def pair_cosines(
    ntk: torch.Tensor, alive: torch.Tensor, prompts: torch.Tensor, signs: torch.Tensor | None = None
) -> torch.Tensor:
    """
    `[4]`: sum over layers and pairs of sequences of one prompt of the cosine between their gradients, the number of
    these pairs; and the same of different prompts.

    Args:
        ntk (`torch.Tensor`): `[L, m, m]`, `<V_i, V_j>`, in any unit.
        alive (`torch.Tensor`): `[L, m]`, the sequences that have a gradient.
        prompts (`torch.Tensor`): `[m]`, number of each sequence's prompt.
        signs (`torch.Tensor`, *optional*): `[m]`, what the loss multiplies each log-probability by, 1 or -1 (or 0).
    """
    norm = ntk.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
    alive = alive & (norm > 0)
    direction = torch.where(alive, (1 if signs is None else signs.to(norm)) / torch.where(alive, norm, 1), 0)
    both = alive.unsqueeze(2) & alive.unsqueeze(1)
    cosine = torch.where(both, ntk, 0) * direction.unsqueeze(2) * direction.unsqueeze(1)
    same = prompts.unsqueeze(1) == prompts
    pairs = torch.ones_like(same).triu(1)
    sums = [(x * chosen).sum() for chosen in (same & pairs, ~same & pairs) for x in (cosine, both)]
    return torch.stack([total.to(ntk.dtype) for total in sums])
