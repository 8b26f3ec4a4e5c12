"""Training, from a configuration to a report: the file to read first."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from stretto import checkpoint, parallel, runtime, techniques
from stretto.batch import Batch
from stretto.buckets import to_bucket
from stretto.config import Config, LayerDropConfig
from stretto.convert.folder import load_weights
from stretto.data import Data, open_data
from stretto.data.prefetch import prefetch
from stretto.errors import CheckpointError, ConfigError, Preempted
from stretto.evaluate import evaluate
from stretto.files import refuse_links
from stretto.flops import tokens_per_sample, training_flops
from stretto.guard import Guard
from stretto.model import Model, build_model, sites
from stretto.optim import build_optimizer, learning_rate, set_learning_rate, weight_writer
from stretto.page import write_report
from stretto.parallel.data import Portion, PresentGradients, StaticGradients, deal, will_shard
from stretto.report import Meter, Report
from stretto.runtime import Runtime
from stretto.step import PRECISIONS, GraphChoice, Recorders, Trainable, resolve_precision, run_step
from stretto.techniques.layer_drop import LayerDrop
from stretto.techniques.standardize import find_pressure, weight_at
from stretto.trained import save_run
from stretto.weights import initialise


@dataclass
class Run:
    """A run in progress."""

    config: Config
    data: Data
    parts: Trainable
    rt: Runtime
    step: int = 0  # updates done
    tokens: int = 0  # read by them
    best: float = math.inf  # lowest evaluation loss so far
    best_step: int = 0

    @property
    def checkpoints(self) -> Path:
        return Path(self.config.run.dir) / "checkpoints"


def train(config: Config, resume: bool = False) -> Path:
    """Trains what the configuration says and returns the run folder."""
    with runtime.start(config.run) as rt:
        run_from_start_to_end(config, rt, resume)
    return Path(config.run.dir)


def run_from_start_to_end(config: Config, rt: Runtime, resume: bool) -> None:
    """Nothing of it is left when the processes part, not even in an error's frames (runtime.py). A model in DDP would
    be the last to hold their group, and destroy it with the GIL in hand: that waits for threads of gloo's, and they may
    want the GIL."""
    folder = Path(config.run.dir)
    with ExitStack() as cleanup:
        parallel.check_processes(config.parallel, rt.world)
        rt.sequence = config.parallel.sequence
        if rt.is_main:
            _prepare_folder(folder, resume)
            cleanup.enter_context(runtime.lock_folder(folder))
            cleanup.enter_context(runtime.recording_exit(folder, rt, config.run.timeout_s))
        data = _open_data(config, folder, rt)
        if not rt.is_main:  # from here on it is certain that no other run has the folder
            cleanup.enter_context(runtime.recording_exit(folder, rt, config.run.timeout_s))
        config = complete(config, data, rt)
        run = Run(config, data, build(config, rt), rt)
        if resume:
            load_latest(run)
        origin = start_from_folder(run) if config.model.init and run.step == 0 else []
        report = cleanup.enter_context(Report(folder, config.train.steps, run.step, active=rt.is_main))
        if rt.is_main:
            save_run(folder, config, data.labels)
        notes = _explain_parts(config, rt) + _explain_graphs(config, rt, run.parts.precision)
        report.start(runtime.describe_environment(rt), data.describe(), run.parts.describe(), *origin, *notes)
        run_loop(run, report)
        if rt.is_main:
            report.attempt("report.html", lambda: report.say(f"report: {write_report(folder, rt.device)}"))


def build(config: Config, rt: Runtime) -> Trainable:
    """Model, techniques, parallelism, optimizer, weights: each needs the one before."""
    precision = resolve_precision(config.train.precision, rt.device)
    graphs, obstacles = config.train.graphs, _find_obstacles(config, rt, precision)
    if graphs == "on" and obstacles:
        raise ConfigError("train.graphs: " + "; ".join(obstacles))
    may_record = graphs != "off" and not obstacles
    model = build_model(config.model)
    roles = sites(model)
    techniques.apply_all(model, config.techniques, roles, rt.device, precision)
    groups = parallel.build_mesh(rt.device, rt.world, rt.sequence) if rt.sequence > 1 else None
    sharded = parallel.shard(model, config.parallel, roles["block"], rt.device, PRECISIONS[precision], groups)
    model.to_empty(device=rt.device)
    optimizer = build_optimizer(model, config.optim, config.techniques.fused, config.run.seed)
    drop, standard = config.techniques.layer_drop, config.techniques.standardize
    by_depth = standard is not None and standard.depth_init
    initialise(model, config.model, config.run.seed, weight_writer(optimizer), by_depth)
    if config.train.compile:
        # One graph for the whole model; or one for each block, the same for all, where nothing is left to fuse between
        # blocks, not all of them work, or each block's weights are gathered on their own. The function is compiled, not
        # the call: hooks, which gather those weights, stay outside.
        by_block = sharded or config.techniques.fused is not None or drop is not None
        torch._dynamo.config.recompile_limit = 64  # kinds of blocks, training or not, first and later shapes
        for module in [model.get_submodule(name) for name in roles["block"]] if by_block else [model]:
            module.forward = torch.compile(module.forward)
    gradients: StaticGradients | None = None
    if may_record and max(rt.world, config.train.micro_batches) > 1:
        gradients = StaticGradients(model)
    elif drop is not None and drop.gate == "batch" and rt.world > 1 and not sharded:
        gradients = PresentGradients(model)
    # Parts of a micro-batch are dropped from differently, as different samples are.
    portion = find_portion(config, rt)
    stream = (portion.part,) if portion.parts > 1 else ()
    parts = Trainable(
        model=model if sharded or may_record or gradients is not None else parallel.replicate(model),
        plain=model,
        optimizer=optimizer,
        guard=Guard("fp16" if precision == "fp16" else config.train.non_finite, rt.device),
        scaler=torch.amp.GradScaler(rt.device.type, enabled=precision == "fp16"),
        precision=precision,
        device=rt.device,
        clip=config.optim.clip,
        seed=config.run.seed,
        layer_drop=None if drop is None else build_layer_drop(drop, config, model, stream),
        split=None if groups is None else build_splitter(config, groups),
        # Our own kernels drop by a token's place in the whole batch, with the same keys in all processes. Torch's know
        # no places, so there each part of a sequence draws masks of its own.
        stream=stream if groups is None or config.techniques.fused else (*stream, groups.get_local_rank("sequence")),
        may_record=may_record,
        pressure=find_pressure(model),
        gradients=gradients,
    )
    if graphs == "on":
        parts.recorders = Recorders(parts)
    return parts


def build_splitter(config: Config, groups: DeviceMesh) -> parallel.Splitter:
    cfg, reason = parallel.choose(config.parallel, config.model, config.data.seq_len, groups.size())
    return parallel.Splitter(cfg, config.model, groups.get_group("sequence"), reason)


def find_portion(config: Config, rt: Runtime) -> Portion:
    return deal(config.train.micro_batches, rt.data_rank, rt.data_world)


def build_layer_drop(cfg: LayerDropConfig, config: Config, model: Model, stream: tuple[int, ...] = ()) -> LayerDrop:
    num_blocks = {name: len(model.get_submodule(name).blocks) for name in sites(model)["stack"]}  # type: ignore[arg-type]
    return LayerDrop(cfg, num_blocks, config.run.seed, config.train.steps, tokens_per_sample(config.model), stream)


def run_loop(run: Run, report: Report) -> None:
    """The steps that are left."""
    cfg, rt, parts, first, total = run.config.train, run.rt, run.parts, run.step, run.config.train.steps
    meter, choice = Meter(rt.device, rt.world), GraphChoice(parts, rt, report.say)
    portion = find_portion(run.config, rt)

    def batches_of(step: int) -> list[tuple[int, Batch]]:
        mine = portion.find_micro_batches(step)
        batches = [(i, run.data.train_batch(i, portion.part, portion.parts)) for i in mine]
        if parts.may_record:
            batches = [(i, to_bucket(batch)) for i, batch in batches]
        if parts.layer_drop is not None:
            batches = [(i, parts.layer_drop(batch, step, i)) for i, batch in batches]
        if parts.split is not None:
            batches = [(i, parts.split(batch)) for i, batch in batches]
        return [(i, batch.to(rt.device)) for i, batch in batches]

    for step, batches in prefetch(batches_of, first, total):
        # The one message between hosts per step: what was read, and whether anyone was asked to stop.
        labels, tokens, slots, padding, flops, stop = rt.sum_over_ranks([*_count(run.config, batches), int(rt.stop)])
        lr = learning_rate(run.config.optim, step, total)
        set_learning_rate(parts.optimizer, lr)
        if parts.pressure is not None and run.config.techniques.standardize is not None:
            parts.pressure.weight = weight_at(run.config.techniques.standardize, step, total)
        with choice.watch():
            loss_sum, grad_norm = run_step(parts, batches, labels, rt.world)
        run.step, run.tokens = step + 1, run.tokens + tokens
        meter.add(tokens, slots, padding, flops)
        if parts.recorders is not None:
            meter.leave_out_recording(parts.recorders.memory.seconds)
        report.advance(run.step)
        if run.step == 1 or _due(cfg.log_every, run):
            cancelled = parts.guard.check(run.step)
            loss = float(rt.sum_tensor(loss_sum)) / max(labels, 1)
            values = {"step": run.step, "loss": loss, "lr": lr, "grad_norm": float(grad_norm), "tokens": run.tokens}
            report.train_line(values | meter.read() | {"cancelled": cancelled}, meter.seconds_per_step)
        elif run.step == first + 1:
            meter.restart()  # the first step compiles and allocates: its time says nothing about the others
        with meter.paused():
            better = _due(cfg.eval_every, run) and evaluate_now(run, report)
            if better or stop or _due(run.config.checkpoint.every, run):
                save(run)
        if stop and run.step < total:
            way = "the same command with --resume goes on from there"
            kept = way if run.config.checkpoint.keep else "nothing was saved, since checkpoint.keep = 0"
            raise Preempted(f"stopped after step {run.step} of {total}; {kept}")
    if first < total:
        seconds = {"seconds": round(meter.total_seconds, 3), "recording_s": round(meter.recording_seconds, 3)}
        report.event(finished={"steps": total} | seconds)


def evaluate_now(run: Run, report: Report) -> bool:
    """Whether the model is better than ever before."""
    parts, num_batches = run.parts, run.config.train.eval_batches
    scores = evaluate(parts.plain, parts.precision, run.data, num_batches, run.rt, parts.split)
    report.eval_line(run.step, scores)
    if not scores["eval_loss"] < run.best:  # also if it is NaN
        return False
    run.best, run.best_step = scores["eval_loss"], run.step
    return True


def save(run: Run) -> None:
    run.parts.guard.check(run.step)
    if not run.config.checkpoint.keep:
        return
    state = {
        "step": run.step,
        "tokens": run.tokens,
        "best": run.best if run.best < math.inf else None,
        "best_step": run.best_step,
        "scaler": run.parts.scaler.state_dict(),
        "guard": run.parts.guard.state_dict(),
        "identity": _identity(run),
    }
    shot = checkpoint.snapshot(run.parts.plain, run.parts.optimizer, state)
    if run.rt.is_main:
        checkpoint.save(run.checkpoints, shot, run.config.checkpoint.keep)
    run.rt.barrier()


def load_latest(run: Run) -> None:
    """Goes on from the newest checkpoint that verifies; from the beginning if there is none."""
    found = checkpoint.find_newest(run.checkpoints) if run.rt.is_main else None
    if found is None and run.rt.is_main and checkpoint.steps(run.checkpoints):
        raise CheckpointError(f"no checkpoint in {run.checkpoints} can be used; move them away to begin anew")
    (step,) = run.rt.sum_over_ranks([found or 0])  # the main process looked; now all know
    if step == 0:
        return
    if step > run.config.train.steps:
        raise CheckpointError(f"{run.checkpoints} is at step {step}, beyond train.steps = {run.config.train.steps}")
    shot = checkpoint.load(run.checkpoints, step)
    if "identity" not in shot.state:
        raise CheckpointError(f"{run.config.run.dir} holds a model alone, by `stretto export --fold`: it cannot go on")
    differences = _differences(_identity(run), shot.state["identity"])
    if differences:
        raise CheckpointError(f"{run.config.run.dir} was made by another configuration: " + "; ".join(differences))
    checkpoint.restore_weights(run.parts.plain, shot, weight_writer(run.parts.optimizer))
    checkpoint.restore_moments(run.parts.plain, run.parts.optimizer, shot)
    if shot.state["scaler"]:  # empty unless it was fp16 then too
        run.parts.scaler.load_state_dict(shot.state["scaler"])
    run.parts.guard.load_state_dict(shot.state["guard"])
    run.step, run.tokens = step, shot.state["tokens"]
    run.best = math.inf if shot.state["best"] is None else shot.state["best"]
    run.best_step = shot.state["best_step"]


def start_from_folder(run: Run) -> list[str]:
    """The weights of the Hugging Face folder `model.init` take the place of the first ones; says what came from it."""
    cfg = run.config.model
    return load_weights(Path(cfg.init), run.parts.plain, cfg, weight_writer(run.parts.optimizer))


def _identity(run: Run) -> dict[str, Any]:
    """What must be equal for a resumed run to be the same run; the step then says all else (data position, learning
    rate, random numbers). Lengths, intervals, places and the number of processes may change."""
    config, places = run.config, {"train", "eval", "test", "cache", "tokenizer"}
    return {
        "model": {key: value for key, value in asdict(config.model).items() if key != "init"},
        "optim": asdict(config.optim),
        "data": {key: value for key, value in asdict(config.data).items() if key not in places},
        "run": {"seed": config.run.seed},
        "train": {"micro_batches": config.train.micro_batches},
        # Others leave the training as it is.
        "techniques": {name: asdict(config)["techniques"][name] for name in ("layer_drop", "standardize")},
        "content": {"data.train": run.data.fingerprint, "num_train": run.data.num_train},
    }


def complete(config: Config, data: Data, rt: Runtime) -> Config:
    """Fills in what only the data can tell, and checks that it and the number of processes fit."""
    model, parts = config.model, find_portion(config, rt).parts
    if model.positions == "rotary":  # no table to outgrow: what was trained can also be generated
        model = replace(model, max_len=max(model.max_len, config.data.seq_len))
    if data.tokenizer is not None:
        size = data.tokenizer.size
        if model.vocab == 0:
            model = replace(model, vocab=-(-size // 64) * 64)
        elif model.vocab < size:
            raise ConfigError(f"model.vocab = {model.vocab} is smaller than the tokenizer's {size}; set it to 0")
        if model.kind == "decoder" and len(data.tokenizer.encode(config.train.sample)) + 1 >= model.max_len:
            raise ConfigError(f"train.sample is longer than model.max_len = {model.max_len} tokens")
    elif model.classes == 0:
        model = replace(model, classes=len(data.labels))
    elif model.classes < len(data.labels):
        raise ConfigError(f"model.classes = {model.classes}, but the data has {len(data.labels)} classes; set it to 0")
    if config.data.task != "translation" and config.data.batch_size < parts:
        raise ConfigError(
            f"data.batch_size = {config.data.batch_size} cannot be shared by {parts} {_name_sharers(rt)}: raise it to "
            f"{parts} or more, make train.micro_batches a multiple of {rt.data_world}, or use fewer processes"
        )
    return replace(config, model=model)


def _explain_parts(config: Config, rt: Runtime) -> list[str]:
    """A line for the log, where a process has only a part of each micro-batch that it works on."""
    parts, key = find_portion(config, rt).parts, "max_tokens" if config.data.task == "translation" else "batch_size"
    if parts == 1:
        return []
    size = getattr(config.data, key)
    return [f"batch: {parts} {_name_sharers(rt)} share each micro-batch of data.{key} = {size:,}"]


def _name_sharers(rt: Runtime) -> str:
    return "processes" if rt.sequence == 1 else f"groups of parallel.sequence = {rt.sequence} processes"


def _differences(now: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    defaults = asdict(Config())  # what an option was that the version of that run did not have
    before = {section: defaults.get(section, {}) | saved.get(section, {}) for section in now}
    return [
        f"{section}.{key} was {before[section].get(key)!r}, is {value!r}"
        for section, values in now.items()
        for key, value in values.items()
        if before[section].get(key) != (list(value) if isinstance(value, tuple) else value)
    ]


def _find_obstacles(config: Config, rt: Runtime, precision: str) -> list[str]:
    """Why steps cannot be replayed from CUDA graphs."""
    drop = config.techniques.layer_drop
    by_step = drop is not None and drop.gate == "batch"
    obstacles = {
        "they need a GPU": rt.device.type != "cuda",
        "they need [techniques.fused], whose optimizer keeps all it needs on the device": not config.techniques.fused,
        f"parallel.data = '{config.parallel.data}' gathers weights in the middle of a pass, into memory that moves": (
            will_shard(config.parallel)
        ),
        "parallel.sequence sends keys and values in the middle of a pass": rt.sequence > 1,
        "fp16 adjusts its loss scale on the host: set train.precision to 'bf16'": precision == "fp16",
        "techniques.layer_drop.sampling = 'bernoulli' has too many patterns to record: set it to 'systematic'": (
            drop is not None and by_step and drop.sampling == "bernoulli"
        ),
        "techniques.layer_drop leaves blocks without gradients, which several micro-batches or processes would have to"
        " keep in place: set its gate to 'sample'": by_step and max(rt.world, config.train.micro_batches) > 1,
    }
    return [reason for reason, holds in obstacles.items() if holds]


def _explain_graphs(config: Config, rt: Runtime, precision: str) -> list[str]:
    """A line for the log, where graphs would be chosen if they could be. Nobody expects them on a CPU."""
    obstacles = _find_obstacles(config, rt, precision)
    if config.train.graphs != "auto" or rt.device.type == "cpu" or not obstacles:
        return []
    return ["CUDA graphs: off: " + "; ".join(obstacles)]


def _due(every: int, run: Run) -> bool:
    return run.step == run.config.train.steps or (every > 0 and run.step % every == 0)


def _count(config: Config, batches: list[tuple[int, Batch]]) -> list[int]:
    """Labels, tokens, slots, how many of them are padding, and floating-point operations of these micro-batches."""
    counts, unit = [batch.counts for _, batch in batches], tokens_per_sample(config.model)
    flops = sum(training_flops(config.model, batch.counts, batch.depths) for _, batch in batches)
    return [
        sum(c.labels for c in counts),
        sum(c.tokens for c in counts) * unit,
        sum(c.all_slots for c in counts) * unit,
        sum(c.padding for c in counts) * unit,
        round(flops),
    ]


def _prepare_folder(folder: Path, resume: bool) -> None:
    if not resume and (folder / "checkpoints").exists():
        raise CheckpointError(f"{folder} already holds a run: add --resume to go on with it, or set another run.dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir = {str(folder)!r} cannot be a folder: {error.strerror}") from error
    refuse_links(folder)


def _open_data(config: Config, folder: Path, rt: Runtime) -> Data:
    """The main process first: it may have to tokenise, and the others then find its files."""

    cfg = config.data
    if config.model.init and cfg.tokenizer == config.model.init and checkpoint.steps(folder / "checkpoints"):
        cfg = replace(cfg, tokenizer=str(folder / "data"))  # a run that has begun has all it needs of the other folder

    def open_it() -> Data:
        return open_data(cfg, seed=config.run.seed, folder=folder / "data", image_size=config.model.image_size)

    data = open_it() if rt.is_main else None
    rt.barrier()
    return data or open_it()
