"""The ``args`` of all user functions of slime's shape: every name of slime, made in this one place."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.compat.slime_types import EvalDatasetArgs, SlimeArgs
from asyncrl.config import RunConfig
from asyncrl.config.derived import filled_in, reward_key
from asyncrl.config.eval_sets import EvalSet, eval_sets
from asyncrl.config.resolved import flat

_OFF = (
    "allgather_cp balance_by_flops check_weight_update_equal ci_disable_kl_checker ci_test debug_rollout_only "
    "debug_train_only enable_mtp_training freeze_indexer get_mismatch_metrics keep_old_actor log_correct_samples "
    "log_multi_turn log_passrate mask_offpolicy_in_partial_rollout recompute_loss_function record_memory_history "
    "release_train reset_optimizer_states rollout_external sglang_enable_deterministic_inference "
    "sglang_enable_dp_attention update_weight_disk_keep_files use_distributed_post use_fault_tolerance use_opd "
    "use_rollout_entropy use_rollout_routing_replay use_routing_replay use_stateless_adam "
    "wandb_always_use_train_step"
)
_NONE = (
    "ci_load_grad_norm ci_save_grad_norm custom_megatron_before_log_prob_hook_path "
    "custom_megatron_before_train_step_hook_path custom_megatron_init_path custom_model_provider_path "
    "custom_pg_loss_reducer_function_path custom_tis_function_path custom_update_weight_post_write_path "
    "dump_details freeze_params_name_list http_proxy load_debug_rollout_data load_debug_rollout_data_subsample "
    "load_forge_rollout_data log_probs_max_tokens_per_gpu log_reward_category megatron_config_path "
    "megatron_deepgemm_forward_layers megatron_deepgemm_forward_modules megatron_deepgemm_moe_forward_layers "
    "megatron_deepgemm_moe_forward_modules memory_snapshot_num_steps model_name moe_router_topk mtp_num_layers "
    "multimodal_keys num_epoch only_train_params_name_list opd_teacher_ckpt_step opd_teacher_load opd_type "
    "padded_vocab_size prefill_num_servers ref_ckpt_step ref_update_interval rollout_buffer_url "
    "rollout_data_postprocess_path rollout_external_engine_addrs router_policy save_debug_rollout_data "
    "save_debug_train_data save_hf sglang_config sglang_context_length sglang_model_routers sglang_reasoning_parser "
    "sglang_router_ip sglang_router_policy sglang_router_port sglang_speculative_algorithm sglang_tool_call_parser "
    "tb_experiment_name tb_project_name update_weight_local_checkpoint_dir"
)
DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(_OFF.split(), False),
    **dict.fromkeys(_NONE.split()),
    "ci_train_rollout_logprob_abs_diff_threshold": 0.1,
    "compute_advantages_and_returns": True,
    "data_pad_size_multiplier": 128,
    "distributed_backend": "nccl",
    "fetch_trajectory_retry_times": -1,
    "log_probs_chunk_size": -1,
    "loss_mask_type": "qwen",
    "loss_type": "policy_loss",
    "memory_recorder": "torch",
    "memory_snapshot_dir": ".",
    "min_batch_collection_ratio": 1,
    "mtp_loss_scaling_factor": 0.2,
    "num_gpus_per_node": 8,
    "opd_kl_coef": 1.0,
    "profile_target": ["train_overall"],
    "qwen_gdn_backend": "fla",
    "rewards_normalization": True,
    "rollout_data_transport": "object-store",
    "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
    "rollout_global_dataset": True,
    "rollout_health_check_first_wait": 0,
    "rollout_health_check_interval": 30.0,
    "rollout_health_check_timeout": 30.0,
    "rollout_sample_hook_path": [],
    "rollout_task_type": "math",
    "sglang_router_request_timeout_secs": 14400,
    "start_rollout_id": 0,
    "train_backend": "megatron",
    "train_env_vars": {},
    "update_weight_delta_checksum": "xxh3-128",
    "update_weight_delta_encoding": "xor",
    "update_weight_mode": "full",
    "wandb_random_suffix": True,
}
"""slime's names that are no settings of asyncrl, with slime's defaults."""
NOT_GIVEN: Mapping[str, Any] = {
    "apply_chat_template_kwargs": {},
    "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
    "eval_function_path": DEFAULTS["rollout_function_path"],
    "micro_batch_size": 1,
    "rollout_num_gpus_per_engine": 1,
    "rollout_skip_special_tokens": False,
    "sglang_server_concurrency": 512,
    "use_rollout_routing_replay": False,
}
"""slime's values of settings that are None here if they are not given."""
_EFFECTIVE = (
    "eps-clip-high",
    "global-batch-size",
    "normalize-advantages",
    "rollout-num-gpus",
    "use-dynamic-batch-size",
    "use-rollout-logprobs",
)
"""Settings that are never None in slime, and here have a default that depends on others."""
_WITHOUT_WORDS = ("eval_prompt_data", "rollout_stop", "rollout_stop_token_ids")
"""Lists that are None in slime if they are empty."""
_NOT_OF_SETS = (
    *("app_service", "custom_generate_function_path", "eval_early_stop_idle_timeout", "eval_early_stop_remaining"),
    *("eval_task_timeout", "message_processor", "min_eval_samples", "multimodal_keys", "no_stop_trim"),
    "skip_special_tokens",
)
"""Attributes of slime's EvalDatasetConfig that no set has here."""
_ALIASES = {
    "sglang_dp_size": "sglang_data_parallel_size",
    "sglang_pp_size": "sglang_pipeline_parallel_size",
    "sglang_ep_size": "sglang_expert_parallel_size",
    "sglang_moe_dp_size": "sglang_moe_data_parallel_size",
}
"""Sizes that slime has under both names."""


def slime_args(run: RunConfig, max_context_len: int | None) -> SlimeArgs:
    """Return the ``args`` of a run; ``max_context_len`` is the maximum length of an episode, None if it is unknown."""
    effective = filled_in(run)
    return completed(
        flat(run)
        | {name.replace("-", "_"): effective[name] for name in _EFFECTIVE if name in effective}
        | {"reward_key": reward_key(run.reward), "eval_datasets": [eval_dataset(each) for each in eval_sets(run)]},
        max_context_len,
    )


def completed(values: Mapping[str, Any], max_context_len: int | None) -> SlimeArgs:
    """Return ``args`` with every name of slime, without an address; ``values`` are settings by slime's names."""
    found = copy.deepcopy(dict(DEFAULTS)) | {name: _as_in_slime(value) for name, value in values.items()}
    found |= {name: copy.copy(value) for name, value in NOT_GIVEN.items() if found.get(name) is None}
    found |= {name: None for name in _WITHOUT_WORDS if not found.get(name)}
    if isinstance(files := found.get("prompt_data"), list) and len(files) == 1:
        (found["prompt_data"],) = files
    return SlimeArgs(**found | _lengths(found, max_context_len) | _depending(found) | _sizes(found))


def _lengths(found: Mapping[str, Any], max_context_len: int | None) -> dict[str, Any]:
    given = found.get("rollout_max_context_len")
    longest = max_context_len or given
    is_dynamic = found.get("use_dynamic_batch_size")
    return {
        "rollout_max_prompt_len": found.get("rollout_max_prompt_len") or (given - 1 if given else None),
        "rollout_max_context_len": longest,
        "eval_max_context_len": found.get("eval_max_context_len") or longest,
        "log_probs_max_tokens_per_gpu": found.get("max_tokens_per_gpu") if is_dynamic else None,
    }


def _depending(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that slime derives from others."""
    has_std = found.get("n_samples_per_prompt") != 1 and not found.get("disable_grpo_std_normalization")
    variables = found.get("apply_chat_template_kwargs")
    return {
        "apply_chat_template_kwargs": json.loads(variables) if isinstance(variables, str) else variables,
        "eval_reward_key": found.get("eval_reward_key") or found.get("reward_key"),
        "grpo_std_normalization": found.get("grpo_std_normalization", has_std),
        "no_save_optim": not found.get("save_optim", True),
        "offload_rollout": bool(found.get("colocate")),
        "offload_train": bool(found.get("colocate")),
        "over_sampling_batch_size": found.get("over_sampling_batch_size") or found.get("rollout_batch_size"),
        "use_critic": found.get("advantage_estimator") == "ppo",
        "use_routing_replay": bool(found["use_routing_replay"] or found["use_rollout_routing_replay"]),
    }


def _sizes(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers of GPUs, and sizes of SGLang under both of their names."""
    per_engine = found["rollout_num_gpus_per_engine"]
    sizes = {short: found.get(short, found.get(long, 1)) for short, long in _ALIASES.items()}
    stages = sizes["sglang_pp_size"]
    return {
        **sizes,
        **{long: sizes[short] for short, long in _ALIASES.items()},
        "critic_num_gpus_per_node": found.get("actor_num_gpus_per_node"),
        "critic_num_nodes": found.get("actor_num_nodes"),
        "rollout_num_gpus": found.get("rollout_num_gpus") or per_engine,
        "sglang_tp_size": per_engine // stages if isinstance(stages, int) and stages > 0 else per_engine,
    }


def eval_dataset(each: EvalSet) -> EvalDatasetArgs:
    """Return a set with the attributes and methods of slime's EvalDatasetConfig, and with its other settings."""
    return EvalDatasetArgs(
        **dict.fromkeys(_NOT_OF_SETS),
        name=each.name,
        path=str(each.path),
        rm_type=each.reward.rm_type,
        custom_rm_path=each.reward.custom_rm_path,
        reward_key=each.reward.reward_key,
        input_key=each.data.input_key,
        label_key=each.data.label_key,
        tool_key=each.data.tool_key,
        metadata_key=each.data.metadata_key,
        apply_chat_template=each.data.apply_chat_template,
        apply_chat_template_kwargs=each.data.template_variables,
        n_samples_per_eval_prompt=each.n_samples_per_eval_prompt,
        temperature=each.temperature,
        top_p=each.top_p,
        top_k=each.top_k,
        max_response_len=each.max_response_len,
        max_prompt_len=each.max_prompt_len,
        min_new_tokens=each.min_new_tokens or None,
        repetition_penalty=each.repetition_penalty,
        stop=list(each.stop) or None,
        stop_token_ids=list(each.stop_token_ids) or None,
        pass_threshold=each.pass_threshold,
        metadata_overrides=dict(each.metadata),
    )


def _as_in_slime(value: Any) -> Any:
    """Return a setting in slime's types: paths are texts there, and tuples lists."""
    if isinstance(value, tuple):
        return [_as_in_slime(each) for each in value]
    return str(value) if isinstance(value, Path) else value
