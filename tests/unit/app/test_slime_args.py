"""Every user function of slime's shape gets the same ``args``, which hold what slime's hold."""

import importlib
import pickle
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from asyncrl.app.checks import Checked, check
from asyncrl.compat import provide_slime
from asyncrl.compat.slime_args import slime_args
from asyncrl.types import Batch
from tests.unit.app.test_checks import QUICKSTART, quickstart
from tests.unit.scored_groups import group

FUNCTIONS = """
from asyncrl.compat import DynamicFilterOutput, RolloutFnEvalOutput, Sample

SEEN = {}

def keep(args, samples, **kwargs):
    SEEN["keep"] = args
    return DynamicFilterOutput(keep=True)

def pick(args, rollout_id, buffer, num_samples):
    SEEN["pick"] = args
    taken, buffer[:] = buffer[:num_samples], buffer[num_samples:]
    return taken

def leave_out(args, groups):
    SEEN["leave_out"] = args

def look(args, groups, source):
    SEEN["look"] = args

def post_process(args, samples):
    SEEN["post_process"] = args
    rewards = [sample.get_reward_value(args) for sample in samples]
    if args.advantage_estimator in ["grpo", "gspo"] and args.rewards_normalization:
        mean = sum(rewards) / len(rewards)
        std = (sum((each - mean) ** 2 for each in rewards) / (len(rewards) - 1)) ** 0.5
        return rewards, [(each - mean) / (std + 1e-6) if args.grpo_std_normalization else each - mean
                         for each in rewards]
    return rewards, rewards

def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    SEEN["log"] = args

def evaluate(args, rollout_id, data_source, evaluation=False):
    SEEN["evaluate"] = args
    return RolloutFnEvalOutput(data={})

class Source:
    def __init__(self, args):
        SEEN["source"] = self.args = args

    def get_samples(self, num_samples):
        return [[Sample(prompt="1+1=")] for _ in range(num_samples)]
"""
FLAGS = {
    "dynamic-sampling-filter-path": "keep",
    "buffer-filter-path": "pick",
    "rollout-sample-filter-path": "leave_out",
    "rollout-all-samples-process-path": "look",
    "custom-reward-post-process-path": "post_process",
    "custom-rollout-log-function-path": "log",
    "eval-function-path": "evaluate",
    "data-source-path": "Source",
}

TRAIN, HELD_OUT = (str(QUICKSTART.parent / "quickstart" / f"{name}.jsonl") for name in ("train", "heldout"))
GIVEN = (
    "actor_num_gpus_per_node actor_num_nodes advantage_estimator allgather_cp apply_chat_template "
    "apply_chat_template_kwargs async_save balance_by_flops balance_data calculate_per_token_loss "
    "check_weight_update_equal ci_disable_kl_checker ci_test ci_train_rollout_logprob_abs_diff_threshold clip_grad "
    "colocate compute_advantages_and_returns data_pad_size_multiplier data_source_path debug_rollout_only "
    "debug_train_only distributed_backend distributed_timeout_minutes enable_mtp_training entropy_coef eps_clip "
    "fetch_trajectory_retry_times freeze_indexer gamma get_mismatch_metrics group_rm grpo_std_normalization "
    "input_key keep_old_actor kl_coef kl_loss_coef kl_loss_type lambd log_correct_samples log_multi_turn "
    "log_passrate log_probs_chunk_size loss_mask_type loss_type lr mask_offpolicy_in_partial_rollout "
    "memory_recorder memory_snapshot_dir metadata_key micro_batch_size min_batch_collection_ratio "
    "mtp_loss_scaling_factor n_samples_per_eval_prompt n_samples_per_prompt no_save_optim normalize_advantages "
    "num_critic_only_steps num_gpus_per_node opd_kl_coef opsm_delta partial_rollout profile_target qwen_gdn_backend "
    "recompute_loss_function record_memory_history release_train reset_optimizer_states rewards_normalization "
    "rollout_batch_size rollout_data_transport rollout_function_path rollout_global_dataset "
    "rollout_health_check_first_wait rollout_health_check_interval rollout_health_check_timeout "
    "rollout_num_gpus_per_engine rollout_sample_hook_path rollout_seed rollout_shuffle rollout_skip_special_tokens "
    "rollout_task_type rollout_temperature rollout_top_k rollout_top_p seed skip_eval_before_train tis_clip "
    "tis_clip_low tool_key train_backend train_env_vars update_weight_buffer_size update_weight_delta_checksum "
    "update_weight_delta_encoding update_weight_disk_keep_files update_weight_mode update_weight_transport "
    "update_weights_interval use_distributed_post use_dynamic_batch_size use_fault_tolerance use_kl_loss use_opd "
    "use_opsm use_rollout_entropy use_rollout_logprobs use_rollout_routing_replay use_routing_replay "
    "use_stateless_adam use_tensorboard use_tis use_unbiased_kl use_wandb value_clip wandb_always_use_train_step "
    "wandb_random_suffix"
)
"""Every argument of slime 624b824a that is not None without a flag."""
NONE = (
    "buffer_filter_path ci_load_grad_norm ci_save_grad_norm custom_advantage_function_path custom_config_path "
    "custom_convert_samples_to_train_data_path custom_eval_rollout_log_function_path custom_generate_function_path "
    "custom_loss_function_path custom_megatron_before_log_prob_hook_path "
    "custom_megatron_before_train_step_hook_path custom_megatron_init_path custom_model_provider_path "
    "custom_pg_loss_reducer_function_path custom_reward_post_process_path custom_rm_path "
    "custom_rollout_log_function_path custom_tis_function_path custom_update_weight_post_write_path dump_details "
    "dynamic_sampling_filter_path eps_clip_c eps_clip_high eval_config eval_function_path eval_input_key "
    "eval_interval eval_label_key eval_max_context_len eval_max_prompt_len eval_max_response_len "
    "eval_min_new_tokens eval_prompt_data eval_reward_key eval_temperature eval_tool_key eval_top_k eval_top_p "
    "freeze_params_name_list global_batch_size hf_checkpoint http_proxy label_key load load_debug_rollout_data "
    "load_debug_rollout_data_subsample load_forge_rollout_data log_probs_max_tokens_per_gpu log_reward_category "
    "max_tokens_per_gpu megatron_config_path megatron_deepgemm_forward_layers megatron_deepgemm_forward_modules "
    "megatron_deepgemm_moe_forward_layers megatron_deepgemm_moe_forward_modules memory_snapshot_num_steps "
    "model_name mtp_num_layers multimodal_keys num_epoch num_rollout num_steps_per_rollout offload_rollout "
    "offload_train only_train_params_name_list opd_teacher_ckpt_step opd_teacher_load opd_type "
    "over_sampling_batch_size padded_vocab_size prompt_data ref_ckpt_step ref_load ref_update_interval reward_key "
    "rm_type rm_url rollout_all_samples_process_path rollout_buffer_url rollout_data_postprocess_path "
    "rollout_external_engine_addrs rollout_max_context_len rollout_max_prompt_len rollout_max_response_len "
    "rollout_num_gpus rollout_sample_filter_path rollout_stop rollout_stop_token_ids save save_debug_rollout_data "
    "save_debug_train_data save_hf save_interval start_rollout_id tb_experiment_name tb_project_name "
    "update_weight_disk_dir update_weight_local_checkpoint_dir wandb_dir wandb_group wandb_host wandb_key "
    "wandb_mode wandb_project wandb_run_id wandb_team"
)
"""Its other arguments."""
SET = (
    "app_service apply_chat_template apply_chat_template_kwargs cache_key custom_generate_function_path custom_rm_path "
    "eval_early_stop_idle_timeout eval_early_stop_remaining eval_task_timeout input_key label_key max_response_len "
    "message_processor metadata_key metadata_overrides min_eval_samples min_new_tokens multimodal_keys "
    "n_samples_per_eval_prompt name no_stop_trim path repetition_penalty rm_type skip_special_tokens stop "
    "stop_token_ids temperature tool_key top_k top_p"
)
"""The attributes of its evaluation sets."""


def checked_with(folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[Checked, dict[str, Any]]:
    """Return the run with all functions, and the ``args`` that they saw."""
    (folder / "seeing_args.py").write_text(FUNCTIONS)
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "seeing_args", raising=False)
    named = [word for flag, name in FLAGS.items() for word in (f"--{flag}", f"seeing_args.{name}")]
    checked = check(quickstart(*named, *flags))
    seen: dict[str, Any] = importlib.import_module("seeing_args").SEEN
    return checked, seen


def call_all(checked: Checked) -> Batch:
    """Call every function, and return the batch behind the hooks."""
    scored = group(3, (0.0, 1.0))
    checked.keep(scored)
    assert checked.pick is not None and checked.hooks.rollout_log is not None
    checked.pick(0, [scored], 1)
    batch = Batch(step=0, groups=(scored,))
    for each in checked.hooks.before_training:
        batch = each.hook(batch, ())
    checked.hooks.rollout_log(0, batch, {})
    evaluate: Any = checked.eval_function
    evaluate(0, {})
    return batch


def test_all_functions_get_the_same_complete_args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked, seen = checked_with(tmp_path, monkeypatch)
    try:
        call_all(checked)
    finally:
        checked.user_code.close()
    assert seen.keys() == {*FLAGS.values()} - {"Source"} | {"source"}
    first = vars(seen["keep"])
    assert {name: vars(args) == first for name, args in seen.items()} == dict.fromkeys(seen, True)
    assert (first["rewards_normalization"], first["rollout_global_dataset"], first["ci_test"]) == (True, True, False)


@pytest.mark.parametrize(("flags", "expected"), [((), 0.707106), (("--disable-grpo-std-normalization",), 0.5)])
def test_a_copy_of_slimes_reward_post_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], expected: float
) -> None:
    checked, _ = checked_with(tmp_path, monkeypatch, *flags)
    try:
        batch = call_all(checked)
    finally:
        checked.user_code.close()
    assert [each.outcome for each in batch.groups[0].samples] == pytest.approx([-expected, expected], abs=1e-5)


def test_args_have_every_name_of_slime_and_no_none_where_slime_has_a_value() -> None:
    args = vars(slime_args(quickstart(), None))
    assert {*GIVEN.split(), *NONE.split()} - args.keys() == set()
    assert [name for name in GIVEN.split() if args[name] is None] == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            (),
            {
                "rollout_skip_special_tokens": False,
                "normalize_advantages": False,
                "use_dynamic_batch_size": True,
                "use_rollout_logprobs": True,
                "use_rollout_routing_replay": False,
                "global_batch_size": 128,
                "micro_batch_size": 1,
                "eps_clip_high": 0.2,
                "apply_chat_template_kwargs": {},
                "train_env_vars": {},
                "rollout_stop": None,
                "rollout_stop_token_ids": None,
                "eval_reward_key": None,
                "rollout_max_context_len": 256,
                "eval_max_context_len": 256,
                "prompt_data": TRAIN,
                "hf_checkpoint": str(QUICKSTART.parent / "quickstart" / "model"),
                "no_save_optim": False,
                "use_critic": False,
                "grpo_std_normalization": True,
                "sglang_tp_size": 1,
                "sglang_data_parallel_size": 1,
            },
        ),
        (("--rollout-skip-special-tokens",), {"rollout_skip_special_tokens": True}),
        (("--rollout-stop", "a", "b"), {"rollout_stop": ["a", "b"]}),
        (("--prompt-data", TRAIN, HELD_OUT), {"prompt_data": [TRAIN, HELD_OUT]}),
        (("--advantage-estimator", "ppo"), {"use_critic": True}),
        (("--n-samples-per-prompt", "1", "--advantage-estimator", "ppo"), {"grpo_std_normalization": False}),
        (("--reward-key", "score"), {"reward_key": "score", "eval_reward_key": "score"}),
        (("--reward-key", "score", "--eval-reward-key", "acc"), {"reward_key": "score", "eval_reward_key": "acc"}),
        (("--no-save-optim",), {"no_save_optim": True}),
        ((), {"over_sampling_batch_size": 16}),
        (("--over-sampling-batch-size", "24"), {"over_sampling_batch_size": 24}),
        (
            ("--apply-chat-template-kwargs", '{"enable_thinking": false}'),
            {"apply_chat_template_kwargs": {"enable_thinking": False}},
        ),
        (("--rollout-max-context-len", "100"), {"rollout_max_prompt_len": 99}),
        (("--rollout-max-context-len", "100", "--rollout-max-prompt-len", "9"), {"rollout_max_prompt_len": 9}),
    ],
)
def test_values_are_slimes(flags: tuple[str, ...], expected: dict[str, Any]) -> None:
    args = vars(slime_args(quickstart(*flags), 256))
    assert {name: args[name] for name in expected} == expected


def test_evaluation_sets_are_in_the_args_of_all_functions() -> None:
    run = quickstart("--apply-chat-template-kwargs", '{"enable_thinking": false}')
    (only,) = slime_args(run, None).eval_datasets
    assert (only.name, only.path) == ("arithmetic", HELD_OUT)
    assert only.apply_chat_template_kwargs == {"enable_thinking": False}
    assert [name for name in SET.split() if not hasattr(only, name)] == []


def test_an_evaluation_set_has_all_that_slimes_has(tmp_path: Path) -> None:
    file = tmp_path / "sets.toml"
    file.write_text(f"""
[[eval.datasets]]
name = "named"
path = "{HELD_OUT}"
rm_type = "math"
metadata_overrides = {{source = "here"}}
[[eval.datasets]]
name = "plain"
path = "{HELD_OUT}"
tool_key = "mine"
""")
    run = quickstart("--eval-prompt-data", "--eval-config", str(file))
    named, plain = pickle.loads(pickle.dumps(slime_args(run, None))).eval_datasets
    provide_slime()
    slimes = importlib.import_module("slime.utils.eval_config").EvalDatasetConfig
    for each in (named, plain):
        assert [field.name for field in fields(slimes) if not hasattr(each, field.name)] == []
    assert plain.tool_key == "mine"
    assert plain.cache_key == ("plain", HELD_OUT, "prompt", "label", "mine", "metadata")
    row = {"rm_type": "exact", "source": "there", "other": 1}
    assert named.inject_metadata(row) == {"rm_type": "math", "source": "here", "other": 1}
    assert plain.inject_metadata(row) == row, "the row's reward wins over the run's"
    assert plain.inject_metadata(None) == {}
