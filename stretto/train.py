"""Training, from a configuration to a report: the file to read first."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from stretto import checkpoint, ending, runtime
from stretto.average import use_means
from stretto.batch import Batch
from stretto.build import build, describe_context, find_portion, run_step
from stretto.capacity import require_room
from stretto.config import Config, ModelConfig
from stretto.data import Data, keep_tokenizer, open_data
from stretto.data.prefetch import prefetch
from stretto.errors import CheckpointError, ConfigError, Preempted, tell
from stretto.evaluate import evaluate
from stretto.files import make_folder, refuse_links, remove_stale_drafts
from stretto.flops import tokens_per_sample, training_flops
from stretto.generate import find_prompt
from stretto.given import Callbacks, Given
from stretto.length import count_steps, describe_epochs, explain_early_end
from stretto.mesh import Mesh, build_mesh
from stretto.notes import explain_start, find_warnings
from stretto.optim import learning_rate, set_learning_rate
from stretto.report import Meter, Report
from stretto.report.loggers import require_loggers
from stretto.report.page import write_report
from stretto.run import Run, compare_replicas, load_latest, look_at_guard, save, start_from_folder
from stretto.runtime import Runtime
from stretto.techniques import open_techniques
from stretto.techniques.technique import At
from stretto.trained import save_run

LOADING = 0.9  # of run.timeout_s that a batch may take: whoever waits for it should say so before others say the same
NOTHING = Given()


def train(config: Config, resume: bool = False, given: Given = NOTHING) -> Path:
    """Trains what the configuration says, and what it was given, and returns the run folder."""
    config = given.complete(config)
    with runtime.start(config.run) as rt:
        run_from_start_to_end(config, rt, resume, given)
    return Path(config.run.dir)


def run_from_start_to_end(config: Config, rt: Runtime, resume: bool, given: Given = NOTHING) -> None:
    """A function of its own, so that no model is left when the process group is destroyed (runtime.py): a model in DDP
    would hold the group until then, and destroy it while it holds the GIL, for which threads of gloo may be waiting."""
    folder = Path(config.run.dir)
    require_room(config, rt.world, runtime.total_memory(rt.device))
    require_loggers(config.report.loggers)
    with ExitStack() as cleanup:
        callbacks = cleanup.enter_context(Callbacks(given.callbacks, rt))
        mesh = build_mesh(config.parallel, rt.device, rt.rank, rt.world)
        open_techniques(config, describe_context(config, rt, mesh))  # what cannot work is known before data are read
        killed = ""
        if rt.is_main:
            _prepare_folder(folder, resume)
            killed = cleanup.enter_context(runtime.lock_folder(folder))
            remove_stale_drafts(folder)  # of attempts that were killed
            cleanup.enter_context(ending.recording_exit(folder, rt, config))
        data = _open_data(config, folder, rt, given)
        if not rt.is_main:  # from here on it is certain that no other run has the folder
            cleanup.enter_context(ending.recording_exit(folder, rt, config))
        config = complete(config, data, mesh)
        parts = rt.together(lambda: build(config, rt, mesh, given.model))
        run = Run(config, data, parts, rt, mesh, callbacks=callbacks)
        cleanup.enter_context(run.saver)
        if resume:
            load_latest(run)
            run.saver.retire(run.step, run.best_step)
        origin = start_from_folder(run) if config.model.init and run.step == 0 else []
        report = cleanup.enter_context(Report(folder, config.train.steps, run.step, rt.is_main, config))
        if rt.is_main:
            save_run(folder, config, data.labels)
        if killed:
            report.event(taken_over=killed)
        notes = [*describe_epochs(config.train, data), *origin]
        notes += explain_start(config, mesh, parts.techniques, run.step, resume)
        notes += parts.executor.take_notes()
        report.start(runtime.describe_environment(rt), data.describe(), parts.describe(), *notes)
        for warning in find_warnings(config, data, rt.device, rt.world) if rt.is_main else ():
            tell(f"warning: {warning}")
        run_loop(run, report)
        if rt.is_main and not rt.stop:  # who was asked to stop when all was done does not wait for a page
            with rt.interruptible():
                report.attempt("report.html", lambda: report.say(f"report: {write_report(folder, rt.device)}"))


def run_loop(run: Run, report: Report) -> None:
    """The steps that are left."""
    cfg, rt, parts, first, total = run.config.train, run.rt, run.parts, run.step, run.config.train.steps
    saved = first  # the step of the newest checkpoint
    meter, batches_of = Meter(rt.device, rt.world), partial(read_batches, run)

    def gives_up() -> bool:
        return rt.stop and not parts.executor.agrees_late

    parts.executor.resume(first, batches_of)
    if run.evaluated < first < total and _due(cfg.eval_every, run):  # a stop came in between
        evaluate_now(run, report)
    last = first if run.stopped_early else total
    for step, batches in prefetch(batches_of, first, last, LOADING * rt.timeout_s, gives_up):
        labels, *amounts, stop = counts = count_together(run, batches or [])
        if stop or batches is None:
            if run.step > saved:
                parts.executor.end_updates()
                save(run)
            run.saver.settle()
            run.callbacks.agree()
            raise Preempted(explain_stop(run))
        lr, loss_sum, grad_norm = take_step(run, step, batches, counts)
        meter.add(*amounts)
        meter.leave_out_recording(parts.executor.recording_seconds)
        for note in [*parts.executor.take_notes(), *parts.techniques.take_notes()]:
            report.say(note)
        report.advance(run.step)
        saves = _due(run.config.checkpoint.every, run)
        compares = cfg.compare_every > 0 and run.step % cfg.compare_every == 0
        if run.step == 1 or _due(cfg.log_every, run) or _due(cfg.eval_every, run) or saves or compares:
            loss_sum, grad_norm = parts.executor.settle(loss_sum, grad_norm)
        if run.step == 1 or _due(cfg.log_every, run):
            cancelled = look_at_guard(run)
            loss = float(rt.sum_tensor(loss_sum)) / max(labels, 1)
            values = {"step": run.step, "loss": loss, "lr": lr, "grad_norm": float(grad_norm), "tokens": run.tokens}
            values |= meter.read() | cancelled
            report.train_line(values, meter.seconds_per_step)
            for note in parts.update.guard.take_notes():
                report.say(note)
            with meter.paused():
                run.callbacks.after_step(run.step, values)
        elif run.step == first + 1:
            meter.restart()  # the first step compiles and allocates: its time says nothing about the others
        with meter.paused():
            if compares:
                compare_replicas(run)
            better = _due(cfg.eval_every, run) and evaluate_now(run, report)
            if better or saves or run.stopped_early:
                save(run)
                saved = run.step
        if run.stopped_early:
            break
    run.saver.settle()
    if run.stopped_early:
        rt.reason = explain_early_end(cfg, run.step, run.waited, run.best_step)
    if first < run.step:
        report.memory_line(run.config, parts.update, rt)
    report.finish(run.step, rt.reason, meter)


def read_batches(run: Run, step: int) -> list[tuple[int, Batch]]:
    """The micro-batches that this process takes of an update, with their numbers."""
    return [(i, batch.to(run.rt.device)) for i, batch in prepare_batches(run, step)]


def prepare_batches(run: Run, step: int) -> list[tuple[int, Batch]]:
    """The same on the host."""
    portion = find_portion(run.config, run.mesh)
    mine = portion.find_micro_batches(step)
    batches = [(i, run.data.train_batch(i, portion.part, portion.parts)) for i in mine]
    return [(i, run.parts.prepare(batch, At(step, i))) for i, batch in batches]


def count_together(run: Run, batches: list[tuple[int, Batch]]) -> list[int]:
    """The one message between hosts per step: what all processes have read for it, and whether anyone is to stop."""
    counts = [*_count(run.config, batches), int(run.rt.stop or run.saver.failed)]
    return run.parts.executor.exchange(counts, run.rt)


def take_step(run: Run, step: int, batches: list[tuple[int, Batch]], counts: list[int]) -> tuple[float, Tensor, Tensor]:
    """Makes update number `step`: its learning rate, and its loss and norm, as `run_step` gives them."""
    lr = learning_rate(run.config.optim, step, run.config.train.steps)
    set_learning_rate(run.parts.update.optimizer, lr)
    loss_sum, grad_norm = run_step(run.parts, step, batches, counts[0], run.rt.world)
    run.step, run.tokens = step + 1, run.tokens + counts[1]
    run.rt.advance(run.step)
    return lr, loss_sum, grad_norm


def explain_stop(run: Run) -> str:
    if not run.config.checkpoint.keep:
        kept = "nothing was saved, since checkpoint.keep = 0"
    elif not run.step:
        kept = "there is nothing to save yet"
    else:
        kept = "the same command with --resume goes on from there"
    return f"stopped after step {run.step} of {run.config.train.steps}; {kept}"


def evaluate_now(run: Run, report: Report) -> bool:
    """Whether the model is better than ever before; it is not known if a stop comes in between."""
    parts, num_batches, precision = run.parts, run.config.train.eval_batches, run.parts.update.precision
    # The last one belongs to the result; and where a stop comes some updates later, nobody would make up for it.
    can_stop = run.step < run.config.train.steps and not parts.executor.agrees_late
    with use_means(parts.update.average, parts.model):
        scores = evaluate(parts.model, precision, run.data, num_batches, run.rt, run.mesh, parts.techniques, can_stop)
    if not scores:
        return False
    run.evaluated = run.step
    report.eval_line(run.step, scores)
    run.callbacks.after_evaluation(run.step, scores)
    loss = scores["eval_loss"]
    better = math.isfinite(loss) and loss < run.best
    run.waited = 0 if better else run.waited + 1
    if better:
        run.best, run.best_step = loss, run.step
    return better


def complete(config: Config, data: Data, mesh: Mesh) -> Config:
    """Fills in what only the data can tell, and checks that it and the number of processes fit."""
    model, parts, sample = config.model, find_portion(config, mesh).parts, config.train.sample
    if model.positions == "rotary":  # no table to outgrow: what was trained can also be generated
        model = replace(model, max_len=max(model.max_len, config.data.seq_len))
    if config.data.task in ("images", "classification"):
        model = _count_classes(model, len(data.labels))
    if data.tokenizer is not None:
        size = data.tokenizer.size
        if model.vocab == 0:
            model = replace(model, vocab=-(-size // 64) * 64)
        elif model.vocab < size:
            raise ConfigError(f"model.vocab = {model.vocab} is smaller than the tokenizer's {size}; set it to 0")
        if model.kind == "decoder":
            sample = sample or find_prompt(data, data.tokenizer, model.max_len)
            if len(data.tokenizer.encode(sample)) + 1 >= model.max_len:
                raise ConfigError(f"train.sample is longer than model.max_len = {model.max_len} tokens")
    elif config.data.task != "images" and model.vocab == 0 and not model.own:
        raise ConfigError("model.vocab = 0 is that of the tokenizer, and these data have none: set it")
    if config.data.task != "translation" and config.data.batch_size < parts:
        raise ConfigError(
            f"data.batch_size = {config.data.batch_size} cannot be shared by {parts} {mesh.describe_teams()}: raise it "
            f"to {parts} or more, make train.micro_batches a multiple of {mesh.data_world}, or use fewer processes"
        )
    steps = count_steps(config.train, data)
    return replace(config, model=model, train=replace(config.train, sample=sample, steps=steps))


def _count_classes(model: ModelConfig, there: int) -> ModelConfig:
    if 0 < model.classes < there:
        raise ConfigError(f"model.classes = {model.classes}, but the data has {there} classes; set it to 0")
    return replace(model, classes=model.classes or there)


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
    make_folder("run.dir", folder)
    refuse_links(folder)


def _open_data(config: Config, folder: Path, rt: Runtime, given: Given) -> Data:
    """The main process first: it may have to tokenise, and the others then find its files."""

    cfg = config.data
    if config.model.init and cfg.tokenizer == config.model.init and checkpoint.steps(folder / "checkpoints"):
        cfg = replace(cfg, tokenizer=str(folder / "data"))  # a run that has begun has all it needs of the other folder

    def open_it() -> Data:
        if given.data is not None:
            keep_tokenizer(given.data.tokenizer, folder / "data")
            return given.data
        return open_data(cfg, seed=config.run.seed, folder=folder / "data", image_size=config.model.image_size)

    data = rt.while_main(open_it)
    return rt.together(lambda: data or open_it())
