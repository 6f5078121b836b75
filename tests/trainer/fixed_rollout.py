"""Rollout functions that need no model: the completion of a prompt is known by its place in the batch."""


def fixed_rollout(completion, logprobs=None, **columns):
    """
    A `rollout_func` whose completion of the prompt in a `row` is `completion(row)`, drawn with `logprobs(row)` (nobody
    says, if `None`); further columns, such as `env_mask`, are functions of the row as well.
    """

    def rollout(prompts, trainer):
        rows = range(len(prompts))
        return {
            "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": [completion(row) for row in rows],
            "logprobs": None if logprobs is None else [logprobs(row) for row in rows],
            **{name: [value(row) for row in rows] for name, value in columns.items()},
        }

    return rollout
