"""The registry of transforms, and what a trainer refuses of them."""

import pytest

from isopo_trl.advantages import DCPO, Transform, register
from isopo_trl.advantages.transform import TRANSFORMS
from tests import tiny, training


@pytest.fixture(autouse=True)
def registry_as_it_was():
    before = dict(TRANSFORMS)
    yield
    TRANSFORMS.clear()
    TRANSFORMS.update(before)


def test_a_name_that_is_taken_is_refused_unless_it_is_the_same_class_again():
    register("dcpo")(DCPO)
    with pytest.raises(ValueError, match=r"'dcpo' is isopo_trl.advantages.dcpo.DCPO already"):
        register("dcpo")(type("Other", (Transform,), {}))


@pytest.mark.parametrize(("name", "stage"), [("a,b", "rewards"), ("a", "loss")])
def test_a_name_with_a_comma_and_an_unknown_stage_are_refused(name, stage):
    with pytest.raises(ValueError, match=f"advantage_transform='{name}', with stage='{stage}'.*'selection'"):
        register(name)(type("Own", (Transform,), {"stage": stage}))


def tool(text: str) -> str:
    """Says it again.

    Args:
        text: what to say.
    """
    return text


# (settings, options, what the message must name)
REFUSED = [
    ({"advantage_transform": "cppo", "rule": "interacting"}, ["rule='interacting'", "skip_zero_advantage=None"]),
    (
        {
            "advantage_transform": "cppo",
            "rule": "interacting",
            "skip_zero_advantage": True,
            "group_microbatches": True,
        },
        ["rule='interacting' and group_microbatches=True"],
    ),
    ({"advantage_transform": "dcpo,simpletir", "skip_zero_advantage": False}, ["'simpletir'", "_advantage=False"]),
    ({"advantage_transform": "simpletir", "entropy_coef": 0.1}, ["'simpletir'", "entropy_coef"]),
    ({"advantage_transform": "cppo", "token_weights": "p3o"}, ["'cppo'", "token_weights='p3o'"]),
    ({"advantage_transform": "cppo", "top_entropy_quantile": 0.5}, ["'cppo'", "top_entropy_quantile=0.5"]),
    ({"advantage_transform": "empg", "tools": [tool]}, ["'empg'", "one turn", "tools"]),
]


@pytest.mark.parametrize(("settings", "names"), REFUSED, ids=[",".join(settings) for settings, _ in REFUSED])
def test_what_would_compute_all_the_same_or_has_no_meaning_is_refused_by_the_trainer(settings, names, tmp_path):
    options = {"tools": settings["tools"]} if "tools" in settings else {}
    data = tiny.conversational_prompts(6) if options else None
    settings = {name: value for name, value in settings.items() if name != "tools"}
    with pytest.raises(ValueError) as info:
        training.build(tmp_path, data=data, options=options, **settings)
    message = str(info.value)
    assert all(name in message for name in names) and message.count(". ") == 0 and message.endswith("."), message


@pytest.mark.parametrize("name", ["cppo", "simpletir", "gtpo"])
def test_where_groups_stay_whole_the_user_is_told_that_leaving_out_saves_no_time(name, tmp_path, caplog):
    own = {"scale_rewards": "none", "gtpo_threshold": 100.0} if name == "gtpo" else {}
    settings = {"advantage_transform": name, "per_device_train_batch_size": 6, "max_steps": 1, **own}
    with caplog.at_level("WARNING", logger="isopo_trl"):
        training.build(tmp_path, **settings)
        training.build(tmp_path, advantage_transform="dcpo", group_microbatches=True)
        assert "no time is saved" not in caplog.text
        for more in ({}, {"token_weights": "gtpo"}):
            caplog.clear()
            trainer = training.build(tmp_path, group_microbatches=True, **settings, **more)
            assert f"advantage_transform='{name}' leaves" in caplog.text and "no time is saved" in caplog.text
            if name == "cppo":
                trainer.train()
                assert trainer.state.log_history[0]["isopo/skipped_fraction"] == 0, "the warning is not true"


def test_a_transform_that_makes_the_rewards_that_another_takes_may_come_before_it(tmp_path):
    @register("signs")
    class Signs(Transform):
        stage = "rewards"

        def apply(self, generation):
            return 2 * generation.rewards - 1

    def right(completions, **_):
        return [float(sum(map(ord, text)) % 2) for text in completions]

    settings = {"advantage_transform": "signs,g2rl", "g2rl_lambda": 1.0, "max_steps": 1}
    training.build(tmp_path, reward=right, **settings).train()


def test_rewards_that_a_method_does_not_know_end_the_run(tmp_path):
    for name, expected in (("pacs", "0 and 1"), ("g2rl", "1 and -1")):
        settings = {"g2rl_lambda": 1.0} if name == "g2rl" else {}
        trainer = training.build(tmp_path, advantage_transform=name, **settings)
        with pytest.raises(ValueError, match=f"'{name}' needs rewards of {expected}, and this generation has 0"):
            trainer.train()
        assert trainer.state.global_step == 0


def test_a_trainer_that_makes_generations_of_its_own_is_told(tmp_path):
    class Own(training.ISOPOTrainer):
        def _calculate_rewards(self, *args):
            raise NotImplementedError

        def _generate_and_score_completions(self, inputs):
            return self._transformed(*self.made)

    trainer = training.build(tmp_path, kind=Own, advantage_transform="dcpo")
    batch = type("Made", (dict,), {"advantages": [0.0] * 3})()
    trainer.made = (batch, [], [])
    with pytest.raises(RuntimeError, match="needs the rewards of TRL's own generation, which Own does not make"):
        trainer.train()
