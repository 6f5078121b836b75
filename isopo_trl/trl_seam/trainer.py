"""TRL's trainer: the attributes and methods that are read, borrowed or overridden."""

from .required import require


get_config_model_id = require("trl.trainer.utils.get_config_model_id", "config")

# What isopo_trl reads, sets, or borrows for the length of a call
_ATTRIBUTES = (
    *("loss_type", "beta", "epsilon_low", "epsilon_high", "off_policy_mask_threshold", "temperature", "ref_model"),
    *("entropy_coef", "use_adaptive_entropy", "_entropy_bonus_enabled", "router_aux_loss_coef", "aux_loss_enabled"),
    *("reward_funcs", "reward_func_names", "reward_weights", "reward_processing_classes"),
    *("rollout_func", "use_transformers_continuous_batching", "use_vllm", "vllm_importance_sampling_correction"),
    *("mask_truncated_completions", "num_iterations", "_metrics"),
)
require("trl.GRPOTrainer.__init__", "model", "reward_funcs", "args", mentions=_ATTRIBUTES)
require("trl.GRPOTrainer.training_step", "model", "inputs", "num_items_in_batch")
require("trl.GRPOTrainer.compute_loss", "model", "inputs", "return_outputs", "num_items_in_batch")
# Between the last backward and the optimizer's step
require("trl.GRPOTrainer._get_grad_norm", "model", "grad_norm")
require("trl.GRPOTrainer._run_epoch", mentions=("_get_grad_norm",))
# What the log says of the learning rate
require("trl.GRPOTrainer._get_learning_rate")
require("trl.GRPOTrainer._maybe_log_save_evaluate", mentions=("_get_learning_rate",))
require("trl.GRPOTrainer.create_model_card", "model_name", "dataset_name", "tags")
require("trl.GRPOTrainer.training_step", mentions=("_step",))
require("trl.GRPOTrainer._get_train_sampler", "dataset", mentions=("generation_batch_size", "num_generations"))
require("trl.GRPOTrainer._load_from_checkpoint", mentions=("_issue_warnings_after_load",))
require("trl.GRPOTrainer._load_best_model", mentions=("_issue_warnings_after_load",))
