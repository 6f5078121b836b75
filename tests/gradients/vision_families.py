"""
The same as [`architectures`] for every family of vision-language models, with an image in each prompt: what
stands beside the text's decoder (the vision tower and its projection) is frozen, or trained.

[`architectures`] examines these as well. Families differ in how an image is given; [`IMAGES`] has the
ways that are known, and the first with which a model runs, and in which its loss depends on the image, is taken.
"""

import inspect
import re

import torch
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tests import oracle
from tests.gradients import architectures
from tests.gradients.architectures import EQUAL, RAGGED, VALUES, Alone, Case, Outcome


FAMILIES = sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
WAYS = ("tower frozen", "tower trained")
SIDE, PATCH = 16, 4  # of an image, of a patch of it
IMAGE, START, END = 90, 93, 94  # tokens

SIZES = {
    IMAGE: "image_token_id image_token_index image_token media_placeholder_token_id",
    91: "video_token_id video_token_index",
    92: "audio_token_id",
    START: "vision_start_token_id boi_token_id image_start_token_id",
    END: "vision_end_token_id eoi_token_id image_end_token_id",
    2: "depth spatial_merge_size num_hidden_layers num_global_layers downsample_factor projection_layers",
    SIDE: "image_size num_position_embeddings default_output_length",
    PATCH: "patch_size mm_tokens_per_image",
    32: "out_hidden_size projection_dim projector_hidden_size vision_output_dim encoder_hidden_size",
    48: "projector_intermediate_size",
}
SIZES[32] += " projector_input_dim projector_output_dim mm_hidden_size projection_hidden_size base_channels"
KNOWN = VALUES | {name: value for value, names in SIZES.items() for name in names.split()}
KNOWN["vision_config"] = None  # of small sizes, where it is none by default
KNOWN |= {"image_grid_pinpoints": [[SIDE, SIDE]], "projector_patch_to_query_dict": {(SIDE // PATCH) ** 2: 4}}

_MROPE = {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}}
OWN: dict[str, dict] = {
    name: _MROPE for name in ("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_vl", "qwen2_5_vl")
}
OWN |= {
    "glm4v_moe": {
        "text_config": {"rope_parameters": {**_MROPE["text_config"]["rope_parameters"], "mrope_section": [1, 1, 0]}}
    },
    "llama4": {"vision_config": {"intermediate_size": 128}},
    "mllama": {
        "vision_config": {"intermediate_layers_indices": [0], "vision_output_dim": 64},
        "text_config": {"cross_attention_layers": [1]},
    },
    "qwen4_exp": {**architectures.OWN["qwen4_exp"]},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "step3p7": {"text_config": {"sliding_window": 8}},
}


def build(family):
    config = architectures.shrunk(CONFIG_MAPPING[family], OWN.get(family), KNOWN)
    return architectures.from_config(AutoModelForImageTextToText, config)


# How an image is given: functions of the configuration of the tower and a random stream


def as_pixels(config, random):
    return {"pixel_values": torch.randn(1, 3, SIDE, SIDE, generator=random)}


def as_pixels_and_size(config, random):
    return as_pixels(config, random) | {"image_sizes": torch.tensor([[SIDE, SIDE]])}


def as_tiles(config, random):
    return {"pixel_values": torch.randn(1, 2, 3, SIDE, SIDE, generator=random)}


def as_one_tile(config, random):
    return {"pixel_values": torch.randn(1, 1, 3, SIDE, SIDE, generator=random)}


def as_tiles_and_size(config, random):
    return as_tiles(config, random) | {"image_sizes": torch.tensor([[SIDE, SIDE]])}


def as_grid(config, random):
    numbers = 3 * PATCH**2 * getattr(config, "temporal_patch_size", 1)
    patches = (SIDE // PATCH) ** 2
    grid = torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]])
    return {"pixel_values": torch.randn(patches, numbers, generator=random), "image_grid_thw": grid}


def as_patches_in_a_grid(config, random):
    patches = as_grid(config, random)["pixel_values"].view(-1, 3, PATCH, PATCH)
    return {"pixel_values": patches, "image_grid_thw": as_grid(config, random)["image_grid_thw"]}


def as_merged_grid(config, random):
    return as_grid(config, random) | {"image_merge_sizes": torch.tensor([2])}


def as_shaped_patches(config, random):
    patches = (SIDE // PATCH) ** 2
    return {
        "pixel_values": torch.randn(1, patches, 3 * PATCH**2, generator=random),
        "spatial_shapes": torch.tensor([[SIDE // PATCH, SIDE // PATCH]]),
        "pixel_attention_mask": torch.ones(1, patches, dtype=torch.long),
    }


def as_placed_patches(config, random):
    side = SIDE // PATCH
    places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), -1).view(1, -1, 2)
    patches = torch.rand(1, side**2, 3 * PATCH**2, generator=random)
    return {"pixel_values": patches, "image_position_ids": places}


def as_tiles_with_ratio(config, random):
    tiles = config.max_num_tiles
    return {
        "pixel_values": torch.randn(1, 1, tiles, 3, SIDE, SIDE, generator=random),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, tiles, dtype=torch.long),
    }


def as_pixels_and_question(config, random):
    question = {"qformer_input_ids": torch.randint(3, 15, (1, 4), generator=random)}
    return as_pixels(config, random) | question | {"qformer_attention_mask": torch.ones(1, 4, dtype=torch.long)}


def as_packed_patches(config, random):
    side = SIDE // PATCH
    patches = torch.randn(1, 3, PATCH, PATCH * side**2, generator=random)
    return {"pixel_values": patches, "target_sizes": torch.tensor([[side, side]])}


def as_listed_patches(config, random):
    patches = as_patches_in_a_grid(config, random)
    return patches | {"pixel_values": patches["pixel_values"].unsqueeze(0)}


# Where images stand behind each other, if not in the first dimension
AXES = {as_packed_patches: 3, as_listed_patches: 1}


IMAGES = [
    as_merged_grid,
    as_grid,
    as_patches_in_a_grid,
    as_shaped_patches,
    as_placed_patches,
    as_tiles_with_ratio,
    as_packed_patches,
    as_listed_patches,
    as_pixels_and_question,
    as_pixels_and_size,
    as_pixels,
    as_tiles_and_size,
    as_one_tile,
    as_tiles,
]


def images(model, way, number):
    """An image for each of `number` sequences."""
    config, random = getattr(model.config, "vision_config", None), torch.Generator().manual_seed(5)
    found = [way(config, random) for _ in range(number)]
    return [{name: x.double() if x.is_floating_point() else x for name, x in one.items()} for one in found]


def of_text(model, ids):
    """Inputs that say which tokens `[B, T]` are the image's."""
    takes = inspect.signature(model.forward).parameters
    kinds = (ids == IMAGE).long()
    found = {
        name: kinds for name in ("mm_token_type_ids", "token_type_ids", "image_embeds_position_mask") if name in takes
    }
    if "cross_attention_mask" in takes:
        tiles = model.config.vision_config.max_num_tiles
        found["cross_attention_mask"] = torch.ones(*ids.shape, 1, tiles, dtype=torch.long)
    return found


def text(lengths, tokens):
    """A batch with an image of so many `tokens`, between brackets, at the beginning of each prompt."""
    prompts, completions = lengths
    more = tokens + 2
    batch = oracle.random_batch([length + more for length in prompts], completions, 100)
    for s, length in enumerate(prompts):
        first = batch.prompt_ids.shape[1] - length - more
        batch.prompt_ids[s, first : first + more] = torch.tensor([START, *[IMAGE] * tokens, END])
    return batch


def together(found, way):
    axes = {"pixel_values": AXES.get(way, 0)}
    return {name: torch.cat([one[name] for one in found], dim=axes.get(name, 0)) for name in found[0]}


def loss(case, found, way):
    ids, mask = case.batch.input_ids, case.batch.attention_mask
    inputs = together(found, way) | of_text(case.model, ids)
    return architectures.loss_of(case.model, ids, mask, case.weights, **inputs)


def tokens_of(model, way):
    """How many tokens an image takes, as the model itself says where there are too few or too many of them."""
    tokens = 1
    for _ in range(3):
        batch = text(EQUAL, tokens)
        case = Case(model, batch, oracle.token_weights(batch), False, Alone([], [], []), [])
        try:
            with torch.no_grad():
                loss(case, images(model, way, 3), way)
            return tokens
        except Exception as error:
            told = re.search(r"do not match.*features\D*(\d+)", str(error), re.DOTALL)
            if told is None:
                raise
            # Some count numbers, of which a token has 32
            tokens = int(told[1]) // 3 if int(told[1]) // 3 != tokens else tokens // 32
    raise ValueError("how many tokens an image takes is not found")


def prepared(model):
    """As [`~tests.gradients.architectures.prepared`], with images."""
    takes = inspect.signature(model.forward).parameters
    reasons = []
    for way in IMAGES:
        try:
            names = set(images(model, way, 1)[0])
        except AttributeError:  # made for other towers
            continue
        if not names.issubset(takes):
            continue
        try:
            with architectures.limits():
                tokens = tokens_of(model, way)
        except Exception as error:
            reasons.append(f"{way.__name__}: {architectures.told(error)}")
            continue
        for lengths in (RAGGED, EQUAL):
            batch = text(lengths, tokens)
            case = Case(model, batch, oracle.token_weights(batch), False, Alone([], [], []), [])
            try:
                with architectures.limits():
                    reason = prepare(case, way)
            except Exception as error:
                reason = architectures.told(error)
            if reason is None:
                if lengths is EQUAL:
                    case.notes.append("with sequences of equal length, since padding changes its loss")
                return case
            reasons.append(f"{way.__name__}: {reason}")
    return Outcome("not examined", reasons[0] if reasons else "how an image is given to it is not known here")


def prepare(case, way):
    """Fill in what the sequences alone give; returns what is not as it must be."""
    model, batch = case.model, case.batch
    found = images(model, way, 3)

    def further(s, columns):
        return found[s] | of_text(model, batch.input_ids[s : s + 1, columns])

    batch.extra.update(together(found, way), **of_text(model, batch.input_ids))
    reached = case.backward()
    idle = [name for name, p in model.named_parameters() if p.requires_grad and name not in reached]
    for name in idle:
        model.get_parameter(name).requires_grad_(False)
    case.single = architectures.alone(model, batch, case.weights, further=further)
    with torch.no_grad():
        whole = loss(case, found, way).item()
        other = loss(case, [found[1], *found[1:]], way).item()
    if abs(whole - other) <= 1e-9 * abs(whole):
        return "its loss does not depend on the image"
    if abs(sum(case.single.losses) - whole) > 1e-10 * max(abs(whole), 1):
        for name in idle:
            model.get_parameter(name).requires_grad_(True)
        return "a sequence alone has another loss than in a batch"
    if idle:
        case.notes.append(
            f"{len(idle)} parameters take no part in the loss and are frozen: {architectures.places(idle)}"
        )
    return None


def freeze_tower(model):
    """Leave the text's decoder and the head."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    kept = {p for module in (decoder, head) if module is not None for p in module.parameters()}
    for p in model.parameters():
        p.requires_grad_(p in kept)
    return len(kept) < len(list(model.parameters()))


def examine(family, ways=WAYS):
    """What becomes of a family with images, its tower frozen and trained."""
    outcomes = {}
    for way in ways:
        try:
            with architectures.limits():
                model = build(family)
                if way == "tower frozen" and not freeze_tower(model):
                    outcomes[way] = Outcome("", "has no decoder of its own beside a tower")
                    continue
        except Exception as error:
            reason = f"its small configuration is not built: {architectures.told(error)}"
            outcomes[way] = Outcome("not examined", reason)
            break
        case = prepared(model)
        outcomes[way] = case if isinstance(case, Outcome) else architectures.compared(case)[0]
        if outcomes[way].verdict == "not examined":
            break
    return {way: outcomes.get(way, Outcome("")) for way in ways}
