"""The dry run (``--dry-run``): checks and estimates that need no GPU, no Ray and no weights.

    settings ──▶ missing files ──▶ model, layout, functions ──▶ memory per GPU ──▶ one table ──▶ fits, or not

Memory is computed from ``config.json``; ``capacity.trainer`` and ``capacity.engine`` document what is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl.app.checks import (
    Checked,
    CheckedModel,
    check_files,
    check_flags,
    check_functions,
    check_model,
    look_at_machine,
)
from asyncrl.capacity.engine import EngineMemory, engine_memory, engine_problems
from asyncrl.capacity.routes import RouteMemory, route_memory
from asyncrl.capacity.trainer import SPREAD, RankMemory, RankWorkload, trainer_memory, trainer_problems, with_copy
from asyncrl.config import RunConfig, missing_files
from asyncrl.config.areas.ranges import must, refuse
from asyncrl.config.derived import (
    critic_load,
    filled_in,
    has_critic,
    longest_sample,
    num_ranks,
    row_tokens,
    use_routing_replay,
    uses_reference,
    weight_bytes,
)
from asyncrl.config.eval_sets import eval_sets, longest_request
from asyncrl.data.prompts import EndlessPrompts
from asyncrl.engines.megatron.checkpoint.directory import lacks_weights
from asyncrl.models.shape import ModelShape, read_shape
from asyncrl.models.sizes import model_size
from asyncrl.plain_text import one_line

GB = 1e9
"""Bytes of a gigabyte, as data sheets count."""
SMALL = 100e6
"""Parameters of a model below which a run without GPUs makes sense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The memory that a run needs on its GPUs."""

    shape: ModelShape
    work: RankWorkload
    stages: tuple[RankMemory, ...]
    engine: EngineMemory
    routes: RouteMemory | None
    """Memory of routing replay; None without it."""
    bucket: int
    """Bytes of one bucket of a weight update."""

    @property
    def both(self) -> float:
        """Bytes on a GPU that trainer and engine share, during a weight update.

        A bucket exists twice: as gathered parts and as one tensor.
        """
        return max(stage.weights for stage in self.stages) + self.engine.weights + 2 * self.bucket

    @property
    def put_away(self) -> float:
        """Bytes of host memory per rank that time-shares its GPU, while the engines hold it."""
        return max(stage.weights + stage.optimizer for stage in self.stages)

    @property
    def fullest(self) -> RankMemory:
        """The trainer rank that needs the most memory."""
        return max(self.stages, key=lambda stage: stage.total)


def dry_run(run: RunConfig, console: Console) -> None:
    """Check ``run`` and print its memory per GPU; nothing is started or written.

    Missing files, and limits of this machine, are only listed: the run may be for others.  Raises ConfigError if a
    setting is wrong or a GPU too small.
    """
    lacking = missing_files(run)
    model, files = _checked(run, lacking)
    shape = model.shape
    for line in run.notes:
        console.print(Text(one_line(f"note: {line}")), soft_wrap=True)
    for line in lacking:
        console.print(Text(one_line(f"not there yet: {line}")), soft_wrap=True)
    machine = look_at_machine(run, shape)
    for line in (*machine.errors, *machine.warnings):
        console.print(Text(one_line(f"on this machine: {line}")), soft_wrap=True)
    found = estimate(run, shape)
    console.print(_table(run, found, files))
    refuse([] if run.cluster.device == "cpu" else _too_small(run, found))
    console.print(f"the dry run found nothing wrong{_but_for(lacking)}", highlight=False)


def _but_for(lacking: Sequence[str]) -> str:
    if not lacking:
        return ""
    things = "1 thing is" if len(lacking) == 1 else f"{len(lacking)} things are"
    return f", but the run cannot start here: {things} not there yet"


def estimate(run: RunConfig, shape: ModelShape) -> Estimate:
    """Estimate the memory of trainer ranks and engines on GPUs of ``--gpu-memory-gb``."""
    cluster, train = run.cluster, run.train
    limit = cluster.gpu_memory_gb * GB
    is_sent_by_nccl = num_ranks(run) > 0 and not cluster.colocate and train.update_weight_transport == "nccl"
    work = RankWorkload(
        num_ranks=cluster.num_trainer_ranks,
        num_tokens=row_tokens(run) / run.parallel.context_parallel_size,
        weight_bytes=weight_bytes(run.model),
        critic=_critic(run, shape),
    )
    if is_sent_by_nccl:
        work = with_copy(shape, run.parallel, work, limit=limit, wanted=train.update_weights_during_training)
    engine = engine_memory(
        shape,
        gpus_per_engine=cluster.rollout_num_gpus_per_engine,
        limit=limit,
        weight_bytes=weight_bytes(run.model),
        flags=run.sglang,
        update_buffer_size=train.update_weight_buffer_size if is_sent_by_nccl else 0,
    )
    return Estimate(
        shape=shape,
        work=work,
        stages=trainer_memory(shape, run.parallel, work),
        engine=engine,
        routes=_routes(run, shape, engine.kv_tokens),
        bucket=train.update_weight_buffer_size,
    )


def _routes(run: RunConfig, shape: ModelShape, kv_tokens: int) -> RouteMemory | None:
    if not use_routing_replay(run, is_mixture=shape.experts is not None):
        return None
    page = run.sglang.get("page-size")
    return route_memory(
        shape,
        kv_tokens=kv_tokens,
        page_size=int(page) if isinstance(page, str) and page.isdecimal() else 1,
        batch_tokens=run.rollout.samples_per_step * longest_sample(run, run.rollout.rollout_max_response_len),
    )


def _checked(run: RunConfig, lacking: list[str]) -> tuple[CheckedModel, Checked | None]:
    """Make the checks of ``check`` as far as files exist.  Appends missing things to ``lacking``.

    Returns None in the place of what was read if a file is missing.
    """
    if find_spec("sglang") is None:
        lacking.append("sglang is not installed: --sglang- and --router- flags are not checked")
    else:
        check_flags(run)
    model = check_model(run)
    if missing_files(run, needs_weights=False):
        check_functions(run)
        return model, None
    reference = run.train.ref_load
    if reference is not None and lacks_weights(reference):
        lacking.append(f"ref-load {reference} has no *.safetensors")
        run = replace(run, train=replace(run.train, ref_load=None))
    files = check_files(_without_new_folder(run), model)
    files.user_code.close()
    return model, files


def _without_new_folder(run: RunConfig) -> RunConfig:
    """Return ``run`` without a ``--save`` folder that does not exist, because the check would create it."""
    save = run.checkpoint.save
    return run if save is None or save.exists() else replace(run, checkpoint=replace(run.checkpoint, save=None))


def _critic(run: RunConfig, policy: ModelShape) -> ModelShape | None:
    """Return the critic's shape: the policy's if they share a folder or the critic's config.json is missing."""
    if not has_critic(run.train):
        return None
    folder = critic_load(run.train, run.model)
    is_other = folder != run.model.hf_checkpoint and (folder / "config.json").is_file()
    return read_shape(folder) if is_other else policy


def _too_small(run: RunConfig, found: Estimate) -> list[str]:
    rank, limit = found.fullest, run.cluster.gpu_memory_gb
    lines = trainer_problems(found.stages, num_tokens=found.work.num_tokens, limit=limit * GB) if num_ranks(run) else []
    lines += must(
        not run.cluster.colocate or found.both / GB <= limit,
        f"a weight update needs {found.both / GB:.1f} GB of a GPU that trainer and engine share, which has {limit:g} "
        f"GB (gpu-memory-gb): trainer weights {rank.weights / GB:.1f} GB, engine weights "
        f"{found.engine.weights / GB:.1f} GB; {SPREAD}, "
        "or give more GPUs with rollout-num-gpus-per-engine",
    )
    return lines + engine_problems(
        found.engine,
        gpus_per_engine=run.cluster.rollout_num_gpus_per_engine,
        longest=longest_request(run),
    )


def _table(run: RunConfig, found: Estimate, files: Checked | None) -> Table:
    table = Table(
        box=SIMPLE_HEAD, title=Text(one_line(f"asyncrl · dry run of {run.name}")), title_justify="left", pad_edge=False
    )
    table.add_column("what", no_wrap=True)
    table.add_column("GB per GPU", justify="right", no_wrap=True)
    table.add_column("")
    _add_run(table, run, found, files)
    if run.cluster.device == "cpu":
        table.add_row("memory", "", "not computed with --device cpu")
    else:
        if num_ranks(run):
            _add_trainer(table, run, found)
        _add_engine(table, run, found)
        if run.cluster.colocate:
            _add_shared(table, run, found)
        if found.routes is not None:
            _add_routes(table, run, found.routes)
    table.add_section()
    for name, value in filled_in(run).items():
        if name not in _without_effect(run):
            table.add_row(name, "", Text(one_line(f"{value} (default)")))
    return table


def _without_effect(run: RunConfig) -> set[str]:
    """The settings that this run does not read."""
    is_constant = run.train.lr_decay_style == "constant" and run.train.lr_warmup_fraction is None
    return {
        *([] if run.data.streaming_data else ["num-data-workers"]),
        *(["lr-decay-iters"] if is_constant else []),
    }


def _add_run(table: Table, run: RunConfig, found: Estimate, files: Checked | None) -> None:
    cluster, rollout = run.cluster, run.rollout
    trainer = num_ranks(run)
    count = model_size(found.shape).total
    model = one_line(f"{found.shape.architecture}, {count / 1e6:,.1f} million parameters")
    table.add_row("model", "", Text(model))
    split = (
        f"{trainer} trainer ({cluster.actor_num_nodes} x {cluster.actor_num_gpus_per_node})"
        if trainer
        else "no trainer"
    )
    engines = f"{cluster.num_rollout_gpus} rollout ({cluster.num_engines} x {cluster.rollout_num_gpus_per_engine})"
    shared = f"{trainer}, time-shared" if cluster.colocate else f"{trainer + cluster.num_rollout_gpus}"
    where = "; without GPUs, as many processes" if cluster.device == "auto" and count < SMALL else ""
    table.add_row("processes" if cluster.device == "cpu" else "GPUs", "", f"{shared}: {split}, {engines}{where}")
    samples = f"{rollout.rollout_batch_size} x {rollout.n_samples_per_prompt} samples"
    table.add_row("a step", "", f"{samples}, answers of up to {rollout.rollout_max_response_len:,} tokens")
    table.add_row("prompts", "", _prompts(run, files))
    _add_held_out(table, run, files)
    if found.shape.experts is not None:
        table.add_row("routing replay", "", "off" if found.routes is None else "on: routers take the engines' experts")


def _prompts(run: RunConfig, files: Checked | None) -> str:
    """Return the number of prompts and the length of the longest, where all are read before the run, and the limit."""
    limit = run.data.rollout_max_prompt_len
    counted = "the memory counts 0 tokens of a prompt" if limit is None else f"limit: {limit:,} tokens"
    if files is None or not isinstance(files.prompts, EndlessPrompts):
        return counted
    longest = max(len(prompt.token_ids) for prompt in files.prompts.rows)
    return f"{len(files.prompts):,}, the longest of {longest:,} tokens; {counted}"


def _add_held_out(table: Table, run: RunConfig, files: Checked | None) -> None:
    counts = {each.settings.name: f"{len(each.prompts):,} prompts, " for each in files.held_out} if files else {}
    for place, each in enumerate(eval_sets(run) if run.evaluation.eval_interval is not None else ()):
        kinds = "greedy" if each.temperature == 0 else f"temperature {each.temperature:g}, top-p {each.top_p:g}"
        answers = f"{each.n_samples_per_eval_prompt} answers per prompt, of up to {each.max_response_len:,} tokens"
        text = f"{each.name}: {counts.get(each.name, '')}{answers}; {kinds}"
        table.add_row("" if place else "held-out sets", "", Text(one_line(text)))


def _add_trainer(table: Table, run: RunConfig, found: Estimate) -> None:
    rank, limit = found.fullest, run.cluster.gpu_memory_gb
    shared = "sharded over data-parallel ranks" if run.parallel.use_distributed_optimizer else "replicated"
    recompute = run.parallel.recomputes or "nothing"
    table.add_section()
    table.add_row("[bold]trainer rank", "", f"pipeline stage {rank.stage} of {len(found.stages)}, the fullest")
    _add(table, "weights", rank.weights, "")
    _add(table, "gradients", rank.gradients, "float32")
    _add(table, "optimizer", rank.optimizer, f"Adam in float32, {shared}")
    tokens = f"{found.work.num_tokens:,.0f} tokens of a microbatch per rank; recomputed: {recompute}"
    _add(table, "activations", rank.activations, tokens)
    _add(table, "working memory", rank.working, "backward pass of one layer, or logits")
    if rank.copy:
        _add(table, "weight snapshot", rank.copy, "on rank 0, for updates during training")
    _add(table, "left", limit * GB - rank.total, f"of {limit:g}; for CUDA, NCCL and fragmentation, not counted above")
    if uses_reference(run.train):
        _add_reference(table, run, found)


def _add_reference(table: Table, run: RunConfig, found: Estimate) -> None:
    """Add the host memory for the reference model's weights, and for the policy's while those are in its place."""
    policy = trainer_memory(found.shape, run.parallel, replace(found.work, critic=None))
    num_ranks, size = run.cluster.actor_num_gpus_per_node, 2 * max(stage.weights for stage in policy) / GB
    copies = "the reference model's weights, and the policy's meanwhile"
    table.add_row("  host memory", "", f"{size * num_ranks:.1f} GB per node: {size:.1f} of each rank for {copies}")


def _add_engine(table: Table, run: RunConfig, found: Estimate) -> None:
    engine, cluster = found.engine, run.cluster
    longest = longest_request(run)
    table.add_section()
    table.add_row("[bold]engine", "", f"one of {cluster.num_engines}, on {cluster.rollout_num_gpus_per_engine} GPU(s)")
    _add(table, "weights", engine.weights, "the layers' matrices in fp8" if found.shape.fp8_block else "")
    _add(table, "left free by SGLang", engine.free, f"including {engine.update_buffers / GB:.1f} for weight updates")
    tokens = engine.kv_tokens * engine.attention_copies
    holds = f"{tokens:,} tokens: {tokens / longest:,.1f} answers of {longest:,} tokens"
    _add(table, "KV cache", engine.kv_cache, f"{holds}; at most {run.rollout.sglang_server_concurrency} in flight")


def _add_shared(table: Table, run: RunConfig, found: Estimate) -> None:
    """Add the memory of the three phases of time-sharing, and the host memory for the trainer's state."""
    engine, num_ranks = found.engine, run.cluster.actor_num_gpus_per_node
    engines = engine.weights + engine.free + engine.kv_cache
    most = max(found.fullest.total, found.both, engines)
    host = found.put_away / GB
    table.add_section()
    table.add_row("[bold]shared GPU", "", "the largest of three phases")
    _add(table, "training", found.fullest.total, "the trainer rank above")
    _add(table, "weight update", found.both, f"weights of both, and two buckets of {found.bucket / GB:.1f}")
    _add(table, "generation", engines, "the engine above")
    stays = "for CUDA, NCCL and the other side's small tensors, not counted above"
    _add(table, "left", run.cluster.gpu_memory_gb * GB - most, stays)
    waits = f"weights and optimizer of {num_ranks} ranks during generation: {host:.1f} GB each"
    table.add_row("host memory", "", f"{host * num_ranks:.1f} GB per node: {waits}")


def _add_routes(table: Table, run: RunConfig, routes: RouteMemory) -> None:
    """Add the memory of routing replay."""
    batches = run.rollout.staleness + 1
    table.add_section()
    table.add_row("[bold]routes", "", "the experts of each token, for routing replay")
    _add(table, "engine", routes.engine, "out of the memory that SGLang leaves free")
    if not num_ranks(run):
        return
    table.add_row("  trainer", "", f"up to {routes.batch / GB:.1f} GB of a node's host memory: the batch in training")
    held = f"up to {batches * routes.batch / GB:.1f} GB of host memory: the {batches} batches of the staleness bound"
    table.add_row("  driver", "", held)


def _add(table: Table, what: str, size: float, where: str) -> None:
    table.add_row(f"  {what}", f"{size / GB:.1f}", where)
