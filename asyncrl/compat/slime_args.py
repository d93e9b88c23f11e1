"""The ``args`` of all user functions of slime's shape: every name of slime, made in this one place."""

import copy
from collections.abc import Mapping
from typing import Any

from asyncrl.compat.slime_types import SlimeArgs
from asyncrl.config import RunConfig
from asyncrl.config.derived import reward_key
from asyncrl.config.resolved import flat

_OFF = (
    "allgather_cp balance_by_flops check_weight_update_equal ci_disable_kl_checker ci_test debug_rollout_only "
    "debug_train_only enable_mtp_training get_mismatch_metrics keep_old_actor log_correct_samples log_multi_turn "
    "log_passrate mask_offpolicy_in_partial_rollout offload offload_rollout offload_train recompute_loss_function "
    "release_train reset_optimizer_states rollout_external sglang_enable_deterministic_inference "
    "sglang_enable_dp_attention update_weight_disk_keep_files use_critic use_distributed_post use_fault_tolerance "
    "use_opd use_rollout_entropy use_rollout_routing_replay use_routing_replay use_stateless_adam "
    "wandb_always_use_train_step"
)
_NONE = (
    "ci_load_grad_norm ci_save_grad_norm custom_megatron_before_log_prob_hook_path "
    "custom_megatron_before_train_step_hook_path custom_megatron_init_path custom_model_provider_path "
    "custom_pg_loss_reducer_function_path custom_tis_function_path custom_update_weight_post_write_path dump_details "
    "freeze_params_name_list http_proxy load_debug_rollout_data load_debug_rollout_data_subsample "
    "load_forge_rollout_data log_probs_max_tokens_per_gpu log_reward_category megatron_config_path "
    "memory_snapshot_num_steps model_name moe_router_topk multimodal_keys num_epoch only_train_params_name_list "
    "opd_teacher_ckpt_step opd_teacher_load opd_type ref_ckpt_step ref_update_interval rollout_buffer_url "
    "rollout_data_postprocess_path rollout_external_engine_addrs router_policy save_debug_rollout_data "
    "save_debug_train_data save_hf sglang_context_length sglang_model_routers sglang_reasoning_parser "
    "sglang_router_policy sglang_speculative_algorithm sglang_tool_call_parser tb_experiment_name tb_project_name "
    "update_weight_local_checkpoint_dir"
)
DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(_OFF.split(), False),
    **dict.fromkeys(_NONE.split()),
    "ci_train_rollout_logprob_abs_diff_threshold": 0.1,
    "compute_advantages_and_returns": True,
    "data_pad_size_multiplier": 128,
    "fetch_trajectory_retry_times": -1,
    "log_probs_chunk_size": -1,
    "loss_mask_type": "qwen",
    "loss_type": "policy_loss",
    "memory_recorder": "torch",
    "memory_snapshot_dir": ".",
    "min_batch_collection_ratio": 1,
    "num_gpus_per_node": 8,
    "opd_kl_coef": 1.0,
    "profile_target": ["train_overall"],
    "rewards_normalization": True,
    "rollout_data_transport": "object-store",
    "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
    "rollout_global_dataset": True,
    "rollout_health_check_first_wait": 0,
    "rollout_health_check_interval": 30.0,
    "rollout_health_check_timeout": 30.0,
    "rollout_sample_hook_path": [],
    "rollout_task_type": "math",
    "sglang_dp_size": 1,
    "sglang_pp_size": 1,
    "start_rollout_id": 0,
    "train_backend": "megatron",
    "train_env_vars": "{}",
    "update_weight_mode": "full",
    "wandb_random_suffix": True,
}
"""slime's names that are no settings of asyncrl, with slime's defaults."""


def slime_args(run: RunConfig, max_context_len: int | None) -> SlimeArgs:
    """Return the ``args`` of a run; ``max_context_len`` is the maximum length of an episode, None if it is unknown."""
    return completed(flat(run) | {"reward_key": reward_key(run.reward)}, max_context_len)


def completed(values: Mapping[str, Any], max_context_len: int | None) -> SlimeArgs:
    """Return ``args`` with every name of slime, without an address; ``values`` are settings by slime's names."""
    args = SlimeArgs(**copy.deepcopy(dict(DEFAULTS)) | {name: _as_list(value) for name, value in values.items()})
    args.rollout_max_context_len = max_context_len or getattr(args, "rollout_max_context_len", None)
    args.eval_max_context_len = getattr(args, "eval_max_context_len", None) or args.rollout_max_context_len
    args.grpo_std_normalization = not getattr(args, "disable_grpo_std_normalization", False)
    args.rollout_num_gpus_per_engine = getattr(args, "rollout_num_gpus_per_engine", None) or 1
    args.rollout_num_gpus = getattr(args, "rollout_num_gpus", None) or args.rollout_num_gpus_per_engine
    args.sglang_server_concurrency = getattr(args, "sglang_server_concurrency", None) or 512
    args.eval_reward_key = getattr(args, "eval_reward_key", None) or getattr(args, "reward_key", None)
    return args


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
