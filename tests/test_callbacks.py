"""Validation while training: what is measured is what it says, and training does not notice."""

import asyncio
import copy
import json
import struct

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback
from trl import GRPOTrainer

from isopo_trl import ISOPOTrainer
from isopo_trl.callbacks import ValidationCallback
from tests import tiny, training


pytestmark = pytest.mark.filterwarnings("ignore:You are using '(rollout_func|environment_factory)'")

FIGURES = ("validation/accuracy", "validation/length", "validation/kl")
TIMES = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
# Sampling as unlike greedy decoding as can be
SAMPLING = {"temperature": 2.5, "top_k": 50, "top_p": 0.9, "min_p": 0.01}


class Keeping(ValidationCallback):
    """Keeps the token ids of prompts and completions of the last validation, in the order in which they are made."""

    def validate(self):
        self.rows = []
        return super().validate()

    def _complete(self, prompts):
        output = super()._complete(prompts)
        self.rows += zip(*output, strict=True)
        return output


def model(ending=2.5):
    """A model that ends some of its completions; `ending` is how strongly it feels about it."""
    result = tiny.model("qwen3", tie=False)
    with torch.no_grad():
        result.lm_head.weight[tiny.VOCABULARY[tiny.EOS]] *= ending
    return result


def adapter(dropout=0.0):
    return LoraConfig(r=2, lora_alpha=8, lora_dropout=dropout, target_modules="all-linear")


def sharper(policy):
    """The policy with logits of twice the size."""
    with torch.no_grad():
        policy.lm_head.weight *= 2
    return policy


def shaken(policy, seed=1, size=0.3):
    """The policy with noise added to its trained parameters, as if it had been trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            if p.requires_grad:
                p.add_(size * torch.randn(p.shape, generator=generator))
    return policy


def validating(folder, policy=None, *, data=None, reward=tiny.reward, callback=ValidationCallback, **options):
    """A trainer of two steps and its callback. Options with the callback's names go to it, others to the trainer."""
    own = {name: options.pop(name) for name in ("steps", "batch_size", "kl_prompts") if name in options}
    policy = model() if policy is None else policy
    trainer = training.build(folder, policy, **options)
    validation = callback(trainer, tiny.prompts(3) if data is None else data, reward, **own)
    trainer.add_callback(validation)
    return trainer, validation


def logged(trainer, name):
    return {line["step"]: line[name] for line in trainer.state.log_history if name in line}


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


# When


@pytest.mark.parametrize("every,last,expected", [(2, 3, [0, 2, 3]), (2, 4, [0, 2, 4]), (9, 2, [0, 2])])
def test_validation_is_before_training_every_so_many_steps_and_once_at_the_end(every, last, expected, tmp_path):
    trainer, callback = validating(tmp_path, steps=every, max_steps=last, kl_prompts=2)
    trainer.train()
    lines = [line for line in trainer.state.log_history if FIGURES[0] in line]
    assert [line["step"] for line in lines] == expected == list(callback.completions)
    for line, kept in zip(lines, callback.history, strict=True):
        assert {name: line[name] for name in (*FIGURES, "step")} == kept
        assert "reward" not in line and "loss" not in line
    assert [line["step"] for line in trainer.state.log_history if "loss" in line] == list(range(1, last + 1))


def test_a_second_run_of_the_same_trainer_validates_at_its_end_too(tmp_path):
    trainer, callback = validating(tmp_path, steps=2, max_steps=3, kl_prompts=0)
    for _ in range(2):
        trainer.train()
        assert list(logged(trainer, FIGURES[0])) == [0, 2, 3]


def test_validation_can_be_asked_for_at_any_time(tmp_path):
    trainer, callback = validating(tmp_path)
    assert callback.validate() == logged_line(trainer, 0) == callback.validate()


def logged_line(trainer, step):
    return {name: logged(trainer, name)[step] for name in FIGURES}


# Training does not notice

RUNS = {
    "fisher": (ISOPOTrainer, {"rule": "fisher", "logging_steps": 2}, None),
    "interacting, lora": (ISOPOTrainer, {"rule": "interacting", "kl_in_reward": True, "beta": 0.1}, 0.3),
    "grpo, lora": (GRPOTrainer, {"gradient_checkpointing": False, "logging_steps": 2}, 0.3),
    "grpo": (GRPOTrainer, {"steps_per_generation": 2}, None),
}


@pytest.mark.parametrize("run", RUNS)
def test_training_is_bit_for_bit_the_same_without_the_callback(run, tmp_path):
    kind, settings, dropout = RUNS[run]

    def figures(validation):
        torch.manual_seed(0)  # of the adapter's first values
        options = {} if dropout is None else {"peft_config": adapter(dropout)}
        trainer = training.build(tmp_path, model(), kind, options=options, max_steps=2, **settings)
        if validation:
            trainer.add_callback(ValidationCallback(trainer, tiny.prompts(3), tiny.reward, steps=1, batch_size=2))
        trainer.train()
        lines = [
            {name: value for name, value in line.items() if name not in TIMES}
            for line in trainer.state.log_history
            if FIGURES[0] not in line
        ]
        return weights(trainer), lines, trainer

    (plain, plain_lines, _), (validated, lines, trainer) = figures(False), figures(True)
    assert_equal(validated, plain)
    assert lines == plain_lines
    assert [line["step"] for line in lines if "loss" in line] == ([2] if "logging_steps" in settings else [1, 2])
    divergence = logged(trainer, "validation/kl")
    assert list(divergence) == [0, 1, 2] and divergence[0] == 0 < divergence[2]


@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_model_is_left_as_it_was(checkpointing, tmp_path):
    class After(TrainerCallback):
        seen = []

        def on_step_end(self, args, state, control, model, **_):
            modes = {module.training for module in model.modules()}
            self.seen.append((modes, model.is_gradient_checkpointing, control.should_log))

    trainer, callback = validating(tmp_path, gradient_checkpointing=checkpointing, steps=1)
    trainer.add_callback(After())
    trainer.train()
    assert After.seen == [({True}, checkpointing, True)] * 2
    before, stream = weights(trainer), torch.get_rng_state()
    trainer.model.eval()
    callback.validate()
    assert not trainer.model.training and torch.equal(torch.get_rng_state(), stream)
    assert_equal(weights(trainer), before)


@pytest.mark.parametrize("at", ["reward", "sampling", "policy", "initial policy"])
def test_an_exception_leaves_the_trainer_as_it_was(at, tmp_path):
    def reward(completions, **_):
        if at == "reward":
            raise RuntimeError("broken reward")
        return tiny.reward(completions)

    passes = {"reward": 0, "sampling": 0, "policy": 1, "initial policy": 2}

    def fail(module, args, kwargs):
        seen.append(kwargs.get("fused_lm_head", False))
        if at == "sampling" and trainer.generation_config.do_sample or sum(seen) == passes[at] > 0:
            raise RuntimeError(f"broken {at}")

    seen = []
    trainer, callback = validating(tmp_path, reward=reward, **SAMPLING)
    shaken(trainer.model)
    trainer.model.register_forward_pre_hook(fail, with_kwargs=True)
    before, stream = weights(trainer), torch.get_rng_state()
    settings = (trainer.generation_config.to_dict(), dict(trainer.generation_kwargs))
    with pytest.raises(RuntimeError, match=f"broken {at}"):
        callback.validate()
    assert_equal(weights(trainer), before)
    assert trainer.model.training and torch.equal(torch.get_rng_state(), stream)
    assert (trainer.generation_config.to_dict(), trainer.generation_kwargs) == settings
    assert callback.history == [] and trainer.state.log_history == []


# Accuracy


def greedy(policy, prompt):
    """Token ids of the greedy completion of one prompt (text or messages) by itself."""
    tokenizer = tiny.tokenizer()
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    limit = training.SETTINGS["max_completion_length"]
    with torch.no_grad():
        output = policy.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=limit)
    return output[0, len(ids) :].tolist()


@pytest.mark.parametrize("conversational,batch_size", [(False, 2), (True, 3), (False, None)])
def test_accuracy_is_the_mean_reward_of_greedy_completions(conversational, batch_size, tmp_path):
    data = (tiny.conversational_prompts if conversational else tiny.prompts)(7)
    data = data.add_column("weight", [1.0, 2.0, 0.5, 3.0, -1.0, 0.25, 4.0])
    batches = []

    def reward(completions, prompts, weight, **_):
        batches.append(prompts)
        return [w * value for w, value in zip(weight, tiny.reward(completions), strict=True)]

    policy = model()
    policy.generation_config.update(do_sample=True, temperature=1.5, top_k=20)  # many models on the Hub have such
    trainer, callback = validating(
        tmp_path,
        policy,
        data=data,
        reward=reward,
        batch_size=batch_size,
        kl_prompts=0,
        max_completion_length=6,
        **SAMPLING,
    )
    settings = (trainer.generation_config, copy.deepcopy(trainer.generation_config), dict(trainer.generation_kwargs))
    figures = callback.validate()

    policy, tokenizer = model(), tiny.tokenizer()
    ids = [greedy(policy, prompt) for prompt in data["prompt"]]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    rewards = [w * value for w, value in zip(data["weight"], tiny.reward(texts), strict=True)]
    assert callback.completions[0] == texts
    assert figures["validation/accuracy"] == pytest.approx(sum(rewards) / 7, rel=1e-12)
    assert figures["validation/length"] == sum(map(len, ids)) / 7
    assert len(set(texts)) > 3 and len(set(map(len, ids))) > 1  # else this would say little

    sizes = {2: [2, 2, 2, 1], 3: [3, 3, 1], None: [3, 3, 1]}[batch_size]
    assert list(map(len, batches)) == sizes and sum(batches, []) == list(data["prompt"])
    assert trainer.generation_config is settings[0] and trainer.generation_config == settings[1]
    assert trainer.generation_kwargs == settings[2]


def test_accuracy_follows_the_training(tmp_path):
    trainer, callback = validating(tmp_path, steps=1, learning_rate=0.05, kl_prompts=0)
    trainer.train()
    policy = model()
    policy.load_state_dict(trainer.model.state_dict())
    texts = tiny.tokenizer().batch_decode(
        [greedy(policy, prompt) for prompt in tiny.prompts(3)["prompt"]], skip_special_tokens=True
    )
    assert callback.completions[2] == texts != callback.completions[0]
    assert logged(trainer, "validation/accuracy")[2] == pytest.approx(sum(tiny.reward(texts)) / 3, rel=1e-12)


def test_dropout_is_off_in_validation(tmp_path):
    trained = shaken(get_peft_model(model(), adapter(dropout=0.5)))
    trainer, callback = validating(tmp_path, trained)
    assert trainer.model.training and callback.validate()["validation/kl"] == 0
    ids = [greedy(trained.eval(), prompt) for prompt in tiny.prompts(3)["prompt"]]
    assert callback.completions[0] == tiny.tokenizer().batch_decode(ids, skip_special_tokens=True)


def test_completions_of_conversations_come_to_the_reward_as_messages(tmp_path):
    seen = []

    def reward(completions, **_):
        seen.extend(completions)
        return tiny.reward(completions)

    _, callback = validating(tmp_path, data=tiny.conversational_prompts(2), reward=reward, kl_prompts=0)
    callback.validate()
    assert seen == [[{"role": "assistant", "content": text}] for text in callback.completions[0]]


def test_a_reward_of_none_is_left_out_of_the_accuracy(tmp_path):
    def reward(completions, score, **_):
        return score

    data = Dataset.from_dict({"prompt": ["one", "two", "three", "four"], "score": [1.0, None, 0.0, 1.0]})
    _, callback = validating(tmp_path, data=data, reward=reward, batch_size=3, kl_prompts=0)
    assert callback.validate()["validation/accuracy"] == pytest.approx(2 / 3)


def test_the_reward_is_that_of_gsm8k_unless_another_is_given(tmp_path):
    policy = model()
    with torch.no_grad():
        for character, token in tiny.VOCABULARY.items():
            policy.lm_head.weight[token] *= 5 * character.isdigit()
    data = tiny.prompts(3)
    texts = [tiny.tokenizer().decode(greedy(policy, prompt)) for prompt in data["prompt"]]
    assert all(text.isdigit() for text in texts)
    data = data.add_column("answer", [texts[0], f"#### {int(texts[1]) + 1}", f"So it is.\n#### {texts[2]}"])
    trainer = training.build(tmp_path, policy)
    assert ValidationCallback(trainer, data, kl_prompts=0).validate()["validation/accuracy"] == pytest.approx(2 / 3)


async def asynchronous(completions, **_):
    return tiny.reward(completions)


def demanding(completions, prompts, completion_ids, trainer_state, log_metric, log_extra, **_):
    log_metric("of validation", 1.0)
    log_extra("number", [trainer_state.global_step] * len(completion_ids))
    return tiny.reward(completions)


@pytest.mark.parametrize("reward", [asynchronous, demanding])
def test_a_reward_function_that_training_takes_is_taken_by_validation(reward, tmp_path):
    trainer, callback = validating(tmp_path, reward=reward, kl_prompts=0)
    trainer.train()
    assert logged(trainer, FIGURES[0])[0] == pytest.approx(sum(tiny.reward(callback.completions[0])) / 3)
    assert not logged(trainer, "of validation")


def test_an_asynchronous_reward_function_is_taken_in_a_notebook_too(tmp_path):
    async def cell():  # of a notebook, which runs in an event loop
        return callback.validate()

    _, callback = validating(tmp_path, reward=asynchronous, kl_prompts=0)
    assert asyncio.run(cell())[FIGURES[0]] == pytest.approx(sum(tiny.reward(callback.completions[0])) / 3)


# KL divergence


def policies(case):
    """What to give to the trainer, its options, and an independent model to be the initial policy."""
    torch.manual_seed(0)  # of the adapter's first values
    base, config = model(ending=5), adapter(dropout=0.1)
    if case == "full":
        return base, {}, copy.deepcopy(base)
    if case == "lora":
        return base, {"peft_config": config}, get_peft_model(copy.deepcopy(base), config).eval()
    trained = shaken(get_peft_model(base, config))
    return trained, {}, copy.deepcopy(trained).eval()


def estimate(rows, policy, initial, temperature):
    """`sum_t (exp(d_t) - 1 - d_t)`, averaged over the rows, from passes of one row without padding."""
    total = 0.0
    for row in rows:
        difference = training.log_probabilities(initial, *row, temperature) - training.log_probabilities(
            policy, *row, temperature
        )
        total += (difference.exp() - 1 - difference).sum().item()
    return total / len(rows)


@pytest.mark.parametrize("case", ["full", "lora", "adapter"])
def test_divergence_is_that_of_sampled_completions_from_the_initial_policy(case, tmp_path):
    given, options, initial = policies(case)
    trainer, callback = validating(
        tmp_path,
        given,
        data=tiny.prompts(14),
        callback=Keeping,
        options=options,
        batch_size=3,
        kl_prompts=12,
        learning_rate=0.03,
        temperature=0.7,
    )
    trainer.train()
    assert logged(trainer, "validation/kl")[0] == 0
    policy = copy.deepcopy(initial)
    policy.load_state_dict(trainer.model.state_dict())
    sampled = callback.rows[14:]  # after the greedy ones
    texts = tiny.prompts(14)["prompt"]
    assert [prompt for prompt, _ in sampled] == tiny.tokenizer()(texts[:12])["input_ids"]
    assert len({len(completion) for _, completion in sampled}) > 1
    expected = estimate(sampled, policy, initial, 0.7)
    assert expected > 0.05
    assert logged(trainer, "validation/kl")[2] == pytest.approx(expected, rel=1e-3)
    if case == "adapter":  # the base model would have been another initial policy
        with initial.disable_adapter():
            assert estimate(sampled, policy, initial, 0.7) != pytest.approx(expected, rel=0.05)


def test_completions_for_the_divergence_are_sampled_as_in_training(tmp_path):
    """From the same random stream: those of `generate` with the training's temperature."""
    trainer, callback = validating(tmp_path, callback=Keeping, kl_prompts=3, temperature=1.7, seed=5)
    callback.validate()
    prompts, completions = zip(*callback.rows[3:], strict=True)
    tokenizer, policy = tiny.tokenizer(), model().eval()
    batch = tokenizer(list(tiny.prompts(3)["prompt"]), padding=True, return_tensors="pt")
    sampling = {"do_sample": True, "temperature": 1.7, "top_k": 0, "top_p": 1.0, "max_new_tokens": 6}
    torch.manual_seed(5)
    output = policy.generate(**batch, **sampling)[:, batch["input_ids"].shape[1] :]
    assert list(prompts) == tokenizer(list(tiny.prompts(3)["prompt"]))["input_ids"]
    for row, completion in zip(output.tolist(), completions, strict=True):
        assert row[: len(completion)] == completion


@pytest.mark.parametrize("length", [1, 2])
def test_divergence_converges_to_the_exact_one(length, tmp_path):
    count, temperature, eos = 4000, 0.8, tiny.VOCABULARY[tiny.EOS]
    data = Dataset.from_dict({"prompt": ["What?"] * count})
    initial, policy = model(), sharper(model())
    trainer, callback = validating(
        tmp_path,
        data=data,
        batch_size=1000,
        kl_prompts=count,
        temperature=temperature,
        max_completion_length=length,
        per_device_train_batch_size=300,
        num_generations=3,
    )
    sharper(trainer.model)
    measured = callback.validate()["validation/kl"]

    prompt = torch.tensor(tiny.tokenizer()("What?")["input_ids"])

    def distributions(prefixes):
        with torch.no_grad():
            return [(m(prefixes).logits[:, -1].double() / temperature).log_softmax(-1) for m in (initial, policy)]

    def moments(then, now):
        """Mean and second moment of `exp(d) - 1 - d` over the next token, of each row."""
        value = (then - now).exp() - 1 - (then - now)
        return (now.exp() * value).sum(-1), (now.exp() * value**2).sum(-1)

    then, now = distributions(prompt[None])
    exact = (now.exp() * (now - then)).sum().item()
    mean, square = moments(then, now)
    assert mean.item() == pytest.approx(exact)
    opposite = (then.exp() * (then - now)).sum().item()
    variance = (square - mean**2).item()
    if length == 2:
        vocabulary = torch.arange(len(tiny.VOCABULARY))
        contexts = torch.cat([prompt.expand(len(vocabulary), -1), vocabulary[:, None]], 1)
        p, goes_on = now.exp()[0], vocabulary != eos
        then, now = distributions(contexts)
        second = (now.exp() * (now - then)).sum(-1)
        exact += (p * second)[goes_on].sum().item()
        variance = 2 * (variance + (p * moments(then, now)[1])[goes_on].sum().item())  # at most
    error = (variance / count) ** 0.5
    assert error < 0.1 * exact  # else this would say little
    if length == 1:
        assert abs(opposite - exact) > 5 * error  # nor would it tell from KL(initial || policy)
    assert measured == pytest.approx(exact, abs=4 * error)


def test_dropout_stays_off_with_continuous_batching(tmp_path):
    """TRL puts the model into training mode after each such generation."""
    trained = shaken(get_peft_model(model(), adapter(dropout=0.5)))
    settings = {"num_blocks": 8, "max_batch_tokens": 64, "page_size": 32}  # of a cache that is quick to set up
    trainer, callback = validating(
        tmp_path,
        trained,
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config=settings,
        batch_size=2,
    )
    assert callback.validate()["validation/kl"] == 0
    ids = [greedy(trained.eval(), prompt) for prompt in tiny.prompts(3)["prompt"]]
    assert callback.completions[0] == tiny.tokenizer().batch_decode(ids, skip_special_tokens=True)


def test_divergence_is_not_measured_and_no_copy_kept_without_prompts_for_it(tmp_path):
    trainer, callback = validating(tmp_path, kl_prompts=0)
    trainer.train()
    assert callback._initial is None
    assert all(set(line) == {"step", *FIGURES[:2]} for line in callback.history)
    assert not logged(trainer, "validation/kl")


@pytest.mark.parametrize("case", ["full", "lora"])
def test_a_resumed_run_measures_the_divergence_from_the_original_initial_policy(case, tmp_path):
    def run(checkpoint=None):
        given, options, _ = policies(case)
        settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.05}
        trainer, _ = validating(tmp_path, given, options=options, steps=2, **settings)
        trainer.train(resume_from_checkpoint=checkpoint)
        return logged(trainer, "validation/kl")

    whole = run()
    resumed = run(str(tmp_path / "checkpoint-2"))
    assert whole[2] > 0.05
    assert resumed == pytest.approx(whole, rel=1e-4)


# What a user finds afterwards


def test_log_and_picture_are_in_the_output_folder(tmp_path):
    trainer, callback = validating(tmp_path / "new", kl_prompts=2)
    callback.validate()
    assert (tmp_path / "new" / "validation.png").exists()
    trainer.train()
    log = json.loads((tmp_path / "new" / "trainer_state.json").read_text())["log_history"]
    assert log == trainer.state.log_history and log[-1]["step"] == 2 and FIGURES[0] in log[-1]
    picture = (tmp_path / "new" / "validation.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and picture[12:16] == b"IHDR" and picture[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 1000 and height > 300  # three panels
    assert len(picture) > 5000


# Refusals


@pytest.mark.parametrize(
    "data,settings,message",
    [
        (tiny.prompts(3).select([]), {}, "has 0 rows"),
        (tiny.prompts(3).rename_column("prompt", "question"), {}, r"columns \['question'\].*needs.*column `prompt`"),
        (tiny.prompts(3), {"steps": 0}, "steps=0.*at least 1"),
        (tiny.prompts(3), {"batch_size": 0}, "batch_size=0.*at least 1"),
        (tiny.prompts(3), {"kl_prompts": -1}, "kl_prompts=-1.*at least 0"),
    ],
)
def test_what_cannot_be_validated_is_refused_at_construction(data, settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ValidationCallback(training.build(tmp_path), data, tiny.reward, **settings)


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


class Counter:
    """An environment."""

    def reset(self, **_) -> str:
        return "Count."

    def up(self) -> int:
        """
        Count up.
        """
        return 1

    def get_reward(self) -> float:
        return 0.0


def rollout(prompts, trainer):
    raise AssertionError("not called")


@pytest.mark.parametrize(
    "option",
    [{"tools": [add]}, {"rollout_func": rollout}, {"environment_factory": Counter}],
    ids=lambda x: next(iter(x)),
)
def test_completions_that_are_not_the_models_alone_are_refused(option, tmp_path):
    trainer = training.build(tmp_path, data=tiny.conversational_prompts(6), options=option, max_completion_length=96)
    with pytest.raises(ValueError, match="completes each prompt once.*pass an `eval_dataset`"):
        ValidationCallback(trainer, tiny.conversational_prompts(2), tiny.reward)
