"""`--dry-run`: what a run would do, without a GPU, torch or Ray.

Five parts, each a function that yields lines: the resolved configuration with where every value came from, the layout,
the arithmetic of one step, the bytes that are known before anything runs, and an estimate of each phase's peak. Then
notes. Called by `cli/entry.py`.
"""

import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from rlkit.cli import dry_run_megatron
from rlkit.cli.dry_run_memory import memory_lines
from rlkit.cli.dry_run_phases import phase_lines
from rlkit.cli.machine import cuda_devices
from rlkit.config.fields import all_fields, sections
from rlkit.config.load import DEFAULT, ResolvedConfig
from rlkit.config.redaction import redacted
from rlkit.config.rules import advice, check_paths
from rlkit.config.rules.paths import checkpoints_can_be_read
from rlkit.config.schema import RunConfig
from rlkit.config.sglang_flags import PREFIX
from rlkit.config.wording import count
from rlkit.orchestration.layout import Layout, plan_layout
from rlkit.types.errors import ConfigError

_MAX_WIDTH = 120
_NO_BREAK = "\N{NO-BREAK SPACE}"
_MAX_NODES_DRAWN = 4


def print_dry_run(resolved: ResolvedConfig, file: TextIO) -> None:
    """Write everything to `file`, as wide as the terminal but at most 120 columns.

    ConfigError for checkpoint files that are there and cannot be right.
    """
    cfg = resolved.config
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    if problems := checkpoints_can_be_read(cfg):
        raise ConfigError("\n".join(problems))
    dry_run_megatron.require_possible(cfg)
    layout = plan_layout(cfg)
    parts = [
        ("Configuration", configuration_lines(resolved, width)),
        (f"Layout: {layout_title(cfg, layout)}", layout_lines(layout, slot_word(cfg), width)),
        ("One step", arithmetic_lines(cfg)),
        *_plan_parts(cfg, layout),
        ("Notes", note_lines(cfg)),
    ]
    bold, plain = ("\033[1m", "\033[0m") if file.isatty() else ("", "")
    for title, lines in parts:
        print(f"{bold}{_wrapped(title, width)}{plain}", file=file)
        for line in lines:
            print(_wrapped(line, width), file=file)
        print(file=file)
    print(_wrapped("The configuration is consistent. Dry run: nothing was started.", width), file=file)


def _plan_parts(cfg: RunConfig, layout: Layout) -> list[tuple[str, Iterator[str]]]:
    """What the backend of the run needs."""
    if cfg.train.train_backend == "megatron":
        return [
            ("Groups", dry_run_megatron.group_lines(cfg, layout)),
            ("Memory, estimated", dry_run_megatron.memory_lines(cfg)),
        ]
    return [
        ("Memory that is known beforehand", memory_lines(cfg)),
        ("Peak of each phase, estimated", phase_lines(cfg)),
    ]


def configuration_lines(resolved: ResolvedConfig, width: int) -> Iterator[str]:
    """By section: the values that someone gave, one a line with its origin; then the defaults in one paragraph."""
    given: dict[str, list[tuple[str, str, str]]] = {section: [] for section in sections()}
    defaults: dict[str, list[str]] = {section: [] for section in sections()}
    for name, field in all_fields().items():
        value = getattr(getattr(resolved.config, field.section), name)
        origin = resolved.provenance[name]
        if origin == DEFAULT:
            defaults[field.section].append(f"{name} {_shown(value)}")
        else:
            given[field.section].append((name, _shown(value), origin))
    for name, value in resolved.config.engine.sglang.items():
        given["engine"].append((PREFIX + name, _shown(value), resolved.provenance[PREFIX + name]))
    rows = [row for section_rows in given.values() for row in section_rows]
    name_width = max((len(name) for name, _, _ in rows), default=0)
    value_width = min(max((len(value) for _, value, _ in rows), default=0), width - name_width - 24)
    for section in sections():
        yield f"  {section}"
        for name, value, origin in given[section]:
            yield f"    {name:<{name_width}}  {value:<{value_width}}  {origin}"
        if defaults[section]:
            yield from _paragraph("defaults: ", defaults[section], width)


def layout_title(cfg: RunConfig, layout: Layout) -> str:
    """The layout in one sentence."""
    parts: list[str] = []
    if layout.rank_slots:
        parts.append(count(len(layout.rank_slots), "training rank"))
    if layout.engines:
        each = cfg.cluster.rollout_num_gpus_per_engine
        size = f" of {each} {slot_word(cfg)}s" if each > 1 else ""
        parts.append(count(len(layout.engines), "engine") + size)
    elif cfg.starts_engines:
        parts.append(f"engines of others at {_shown(cfg.engine.rollout_external_engine_addrs)}")
    if layout.rank_slots and layout.engines:
        parts.append("taking turns" if cfg.cluster.colocate else "side by side")
    where = f"{count(layout.num_slots, slot_word(cfg))} on {count(layout.num_nodes, 'node')}"
    return f"{', '.join(parts)}; {where}{' (none here)' if plans_absent_gpus(cfg) else ''}"


def plans_absent_gpus(cfg: RunConfig) -> bool:
    """Nobody said which device is meant, and a launch on this machine would run on its CPU."""
    named = cfg.cluster.gpu_type is not None or cfg.cluster.gpu_memory_gib is not None
    return cfg.cluster.device == "auto" and not named and not cuda_devices()


def layout_lines(layout: Layout, slot: str, width: int) -> Iterator[str]:
    """One block a node, a column a slot: the rank and the engine that live there. A big run shows its ends."""
    rank_at = {place: str(rank) for rank, place in enumerate(layout.rank_slots)}
    engine_at = {place: str(engine.index) for engine in layout.engines for place in engine.slots}
    column = max(map(len, [*rank_at.values(), *engine_at.values(), str(layout.slots_per_node)]), default=1) + 2
    per_line = max(1, (width - 19) // column)
    for node in range(layout.num_nodes):
        if layout.num_nodes > _MAX_NODES_DRAWN and _MAX_NODES_DRAWN - 2 < node < layout.num_nodes - 1:
            if node == _MAX_NODES_DRAWN - 1:
                yield f"  ... {layout.num_nodes - _MAX_NODES_DRAWN} more nodes ..."
            continue
        first = node * layout.slots_per_node
        slots = range(first, min(first + layout.slots_per_node, layout.num_slots))
        for start in range(0, len(slots), per_line):
            part = slots[start : start + per_line]
            title = f"node {node}" if start == 0 else ""
            numbers = {place: str(place - first) for place in part}
            for label, at in ((slot, numbers), ("rank", rank_at), ("engine", engine_at)):
                row = "".join(f"{at.get(place, ''):>{column}}" for place in part).rstrip()
                if row:
                    yield f"  {title if at is numbers else '':<9}{label:<6}{row}"


def arithmetic_lines(cfg: RunConfig) -> Iterator[str]:
    """Prompts x samples -> optimizer steps x global batch -> samples per rank -> micro-batches."""
    if cfg.rollout.num_rollout == 0:
        yield "  none: --num-rollout 0 evaluates once and ends"
        return
    total, prompts, each = cfg.samples_per_rollout, cfg.rollout.rollout_batch_size, cfg.rollout.n_samples_per_prompt
    yield f"  {prompts} prompts x {count(each, 'sample')} = {count(total, 'sample')} per rollout"
    if cfg.starts_engines:
        longest = cfg.rollout.rollout_max_response_len
        yield f"  at most {longest} tokens per response, {total * longest:,} generated tokens per rollout"
    if not cfg.starts_trainer:
        yield "  no training (--debug-rollout-only)"
        return
    steps, batch, ranks = cfg.steps_per_rollout, cfg.batch_size, cfg.data_parallel_size
    per_rank = batch // ranks
    yield f"  = {count(steps, 'optimizer step')} x global batch of {count(batch, 'sample')}"
    yield f"  = {count(per_rank, 'sample')} on each of {count(ranks, 'rank')} per optimizer step"
    yield "  " + _micro_batches(cfg, per_rank)
    if cfg.starts_engines:
        yield "  " + _weight_update(cfg)
    if cfg.async_training.async_mode is not None:
        yield "  " + _meanwhile(cfg)
    if cfg.rollout.num_rollout is not None:
        run = cfg.rollout.num_rollout
        yield f"  whole run: {count(run, 'rollout')}, {run * steps:,} optimizer steps, {run * total:,} samples"
    else:
        yield f"  whole run: {cfg.rollout.num_epoch} x the prompt file (--num-epoch)"


def note_lines(cfg: RunConfig) -> Iterator[str]:
    """Advice, what a launch on this machine would miss, and what cannot be known here."""
    notes = advice(cfg)
    if plans_absent_gpus(cfg):
        notes.append(
            "--device auto is planned for GPUs here, but this machine has none and a launch on it would run on its CPU:"
            " pass --device cpu to plan that, or --gpu-type NAME to plan for a GPU elsewhere"
        )
    may_be_sglang = cfg.engine.rollout_engine == "sglang" or (
        cfg.engine.rollout_engine == "auto" and cfg.cluster.device != "cpu"
    )
    if cfg.starts_engines and may_be_sglang and not cfg.engine.sglang.get("enable_deterministic_inference"):
        notes.append(
            "every sample is sent with its own seed, but SGLang honours seeds only with"
            " --sglang-enable-deterministic-inference; without it two runs differ"
        )
    notes += [f"on this machine a launch would stop here: {problem}" for problem in check_paths(cfg)]
    if not notes:
        yield "  none"
    for note in notes:
        yield f"  - {note}"


def slot_word(cfg: RunConfig) -> str:
    """What a "GPU" of the flags is on the device of the run."""
    return "slot" if cfg.cluster.device == "cpu" else "GPU"


def _micro_batches(cfg: RunConfig, per_rank: int) -> str:
    cp = cfg.train.context_parallel_size
    budget = cfg.train.max_tokens_per_gpu * cp
    flag = f"max_tokens_per_gpu x context_parallel_size = {cfg.train.max_tokens_per_gpu} x {cp}" if cp > 1 else ""
    flag = flag or f"max_tokens_per_gpu = {budget}"
    if cfg.is_supervised:
        return f"micro-batches of at most {budget} tokens ({flag}); a longer row is one by itself"
    prompt, response = cfg.data.rollout_max_prompt_len, cfg.rollout.rollout_max_response_len
    context = cfg.rollout.rollout_max_context_len
    if prompt is not None:
        longest, said = prompt + response, f"{prompt} + {response} tokens"
    else:
        longest, said = response, f"{response} tokens and its prompt"
    if context is not None and (prompt is None or longest > context):
        longest, said = context, f"{context} tokens"
    fitting = max(1, budget // longest)
    fewest = -(-per_rank // fitting)
    return (
        f"if every sample has {said}: at most {fitting} of them in a micro-batch of {flag},"
        f" so at least {count(fewest, 'micro-batch', 'micro-batches')} per rank and optimizer step"
    )


def _meanwhile(cfg: RunConfig) -> str:
    how = "under running requests" if cfg.updates_in_flight else "when the last response is there"
    if not cfg.async_training.is_full:
        return f"one rollout is generated while the one before it trains; weights change {how}"
    options = cfg.async_training
    limit = options.staleness_limit
    most = count((limit + 1) * cfg.rollout.rollout_batch_size, "prompt")
    return (
        f"generation never stops: at most {most} in flight, {count(limit, 'weight version')} behind"
        f" (--stale-groups {options.stale_groups}); weights change {how}"
    )


def _weight_update(cfg: RunConfig) -> str:
    transport = cfg.sync.update_weight_transport
    if transport == "auto":
        transport = "ipc" if cfg.cluster.colocate else "nccl"
    size = cfg.sync.update_weight_buffer_size / 1024**2
    interval = cfg.sync.update_weights_interval
    often = f" after every {interval} steps" if interval > 1 else ""
    return f"new weights go to the engines{often} by {transport}, in buckets of {size:g} MiB"


def _shown(value: Any) -> str:
    """As one would write it: `-` for unset, words of a list with spaces between, no secrets."""
    value = redacted(value)
    if value is None:
        return "-"
    if isinstance(value, tuple | list):
        return " ".join(map(str, value)) if value else "-"
    if isinstance(value, bool | dict):
        return json.dumps(value)
    return "''" if value == "" else str(value)


def _paragraph(title: str, items: Sequence[str], width: int) -> list[str]:
    """Items with commas between, broken only between items."""
    whole = title + ", ".join(item.replace(" ", _NO_BREAK) for item in items)
    wrapped = textwrap.fill(
        whole,
        width=width,
        initial_indent="    ",
        subsequent_indent="      ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped.replace(_NO_BREAK, " ").splitlines()


def _wrapped(line: str, width: int) -> str:
    """The line, if it is too long with its rest set in below; long words, such as paths, stay whole."""
    if len(line) <= width:
        return line
    indent = len(line) - len(line.lstrip()) + 2
    return textwrap.fill(
        line, width=width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
