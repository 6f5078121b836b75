"""GSM8K and files in its format: problems as prompts, and rewards for their answers."""

from .answers import extract_answer
from .data import as_prompts, load_gsm8k
from .rewards import format_reward, gsm8k_reward, math_verify_reward, strict_gsm8k_reward


__all__ = ["as_prompts", "extract_answer", "load_gsm8k"]
__all__ += ["format_reward", "gsm8k_reward", "math_verify_reward", "strict_gsm8k_reward"]
