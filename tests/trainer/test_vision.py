"""A vision-language model: its language model trains with images in the prompt, and so does its vision tower."""

import pytest
import torch
from peft import LoraConfig
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
from trl import GRPOTrainer

from isopo_trl import ISOPOTrainer
from isopo_trl.trl_seam.batch import Batch
from isopo_trl.trl_seam.scoring import Scoring
from tests import oracle, tiny, training


# The last ids of the vocabulary stand for the image and its brackets
VIDEO, END, START, IMAGE = range(len(tiny.VOCABULARY) - 4, len(tiny.VOCABULARY))


def vision_model(frozen=True):
    text = {**tiny.SIZE, **tiny.IDS, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
    text["rope_parameters"]["rope_theta"] = 10000.0
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "in_channels": 3}
    vision |= {"patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 1}
    ids = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **ids))
    model.model.visual.requires_grad_(not frozen)
    return model


def image_batch(rows):
    """Sequences with an image each (16 patches, which become 4 tokens), as TRL lays them out."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.tensor([[START, *[IMAGE] * 4, END, 20 + row, 30] for row in range(rows)])
    completions = torch.randint(9, 90, (rows, 5), generator=generator)
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": torch.linspace(-1, 1, rows),
        "num_items_in_batch": torch.tensor(completions.numel()),
        "pixel_values": torch.randn(16 * rows, 12, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
        "num_images": [1] * rows,
        "mm_token_type_ids": torch.cat([(prompts == IMAGE).long(), torch.zeros_like(completions)], dim=1),
    }


class WithImages(ISOPOTrainer):
    """Every generation is the batch above: the libraries that read images are not needed."""

    def _generate_and_score_completions(self, inputs):
        return image_batch(len(inputs))


@pytest.mark.parametrize(
    ("trained", "rule"), [("language model", "fisher"), ("all", "interacting"), ("adapters", "fisher")]
)
def test_a_vision_model_trains_on_images(trained, rule, tmp_path):
    options = {"peft_config": LoraConfig(r=2, target_modules=["qkv", "q_proj"])} if trained == "adapters" else {}
    model = vision_model(frozen=trained != "all")
    training.train(training.build(tmp_path, model, WithImages, options=options, rule=rule))


def test_steps_are_measured_by_sequences_that_take_their_images_along(tmp_path):
    settings = {"target_kl": 1e-3, "step_kl_share": 0.5, "gradient_accumulation_steps": 2, "learning_rate": 0.1}
    trainer = training.build(tmp_path, vision_model(), WithImages, **settings)
    lines = training.train(trainer)
    assert all(0 < line["step/kl"] < 2e-3 for line in lines) and lines[0]["step/kept"] < 1
    batch = Batch(image_batch(4))
    batch["pixel_values"][16:32] *= 3
    with torch.no_grad():
        whole, some = (Scoring(trainer).logps(each) for each in (batch, batch.rows([1, 3])))
    torch.testing.assert_close(some, whole[[1, 3]])


def test_language_model_trains_on_text_alone(tmp_path):
    training.train(training.build(tmp_path, vision_model(), data=tiny.conversational_prompts(6)))


def test_rule_none_has_the_gradient_of_grpo_on_images(tmp_path):
    own = training.prepared(training.build(tmp_path, vision_model(), rule="none"))
    plain = training.prepared(training.build(tmp_path, vision_model(), GRPOTrainer))
    own, plain = training.gradients(own, image_batch(3)), training.gradients(plain, image_batch(3))
    assert own[0] == pytest.approx(plain[0], abs=1e-6) and training.distance(own[1], plain[1]) < 1e-5


def tower_of(model):
    return {
        name: [p for p in module.parameters(recurse=False) if p.requires_grad]
        for name, module in oracle.trained_modules(model).items()
        if ".visual." in name
    }


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("targets", [None, "all-linear"], ids=["full", "lora"])
def test_every_parameter_of_the_vision_tower_has_the_gradient_of_the_definition(targets, tmp_path):
    model = vision_model(frozen=targets is not None).double()
    options = {}
    if targets is not None:
        options["peft_config"] = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    trainer = training.prepared(training.build(tmp_path, model, options=options, fisher_samples=10_000, **settings))
    model = trainer.model.double()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    kinds = {row["parameter"]: row["kind"] for row in trainer.isopo.coverage()}
    in_tower = {kind for name, kind in kinds.items() if ".visual." in name}
    in_text = {kind for name, kind in kinds.items() if ".visual." not in name}
    assert in_tower == {"any module"} and "linear" in in_text and "any module" not in in_text
    images = image_batch(3)
    images |= {name: images[name].double() for name in ("advantages", "pixel_values")}
    _, found = training.gradients(trainer, images)
    trainer.isopo.detach()
    model.gradient_checkpointing_disable()
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    batch = oracle.Batch(*(images[name] for name in names))

    def image_of(s, columns):
        return {
            "pixel_values": images["pixel_values"][16 * s : 16 * s + 16],
            "image_grid_thw": images["image_grid_thw"][s : s + 1],
            "mm_token_type_ids": images["mm_token_type_ids"][s : s + 1, columns],
        }

    whole = tower_of(model)
    G = oracle.position_gradients(model, batch, oracle.token_weights(batch), whole=whole, inputs=image_of)
    expected = oracle.expected_gradients(model, G, batch, None, "fisher", whole=whole)
    model.zero_grad()
    for name, p in model.named_parameters():
        p.grad = found.get(name)
    error, name = oracle.worst_error(model, expected)
    assert error < 1e-9, f"{name}: {error}"


def test_a_vision_tower_under_reentrant_checkpointing_is_refused_before_the_first_step(tmp_path):
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    trainer = training.build(tmp_path, vision_model(frozen=False), WithImages, **settings)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(RuntimeError, match=r"visual.*use_reentrant.: False"):
        trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
