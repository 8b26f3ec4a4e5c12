"""The search for the recipe that is the fastest on given GPUs, of those that leave the training as it is: an update
learns from as many samples, by the same mathematics unless others are allowed, within the memory that there is.

A choice is a value for each of some keys: the number of micro-batches, the layout of the processes, the precision, and
the options of every technique, which say themselves what is worth trying (estimate.py). What keeps less for the
backward pass costs time, so it is tried only where memory is not enough without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from math import inf, isqrt, prod
from typing import Any, get_args, get_type_hints

from stretto.config import KEEPING, KERNELS, Config, TechniquesConfig, to_toml
from stretto.errors import ConfigError
from stretto.estimate import Section, find_estimate
from stretto.flops import tokens_per_sample, training_flops
from stretto.hardware import GPUS, MOST, Hardware, choose_hardware, make_cpu
from stretto.memory import list_blocks
from stretto.plan import FILLED, complete_sizes, find_size, find_way, for_device
from stretto.planning.layout import Outcome, change, list_parallel, predict
from stretto.planning.times import find_work

MOST_REFINED = 24  # blocks of a model of which each may keep something else: with more of them that takes long
CLOSE = 0.01  # of a time: what is nearer than that cannot be told apart, and the recipe's own choice is kept
MOST_DIVIDED, MOST_COUNTS = 10**6, 48  # numbers by which samples are divided to see, and numbers of micro-batches
NAMED = 3  # other values that are judged one by one, where there are many
ENOUGH = 3  # numbers of micro-batches that fit, from which on more of them are only slower
PER_GPU = 4  # micro-batches for each GPU that are tried at least: layers that are shared wait less with more of them
OFF = "off"  # of a technique
BATCH, LAYOUT, PRECISION = "train.micro_batches", "parallel", "train.precision"


@dataclass(frozen=True)
class Option:
    """A value for one of the keys."""

    key: str
    words: str
    apply: Callable[[Config], Config]


@dataclass(frozen=True)
class Blocks:
    """Of a stack: how many work, on average."""

    work: float


@dataclass(frozen=True)
class Candidate:
    config: Config  # all sizes known, for the device of the plan
    options: tuple[Option, ...]
    outcome: Outcome
    hardware: Hardware
    own: int  # number of options that are the recipe's own

    @property
    def fits(self) -> bool:
        return not self.outcome.problem and self.outcome.memory <= FILLED * self.hardware.memory

    @property
    def seconds(self) -> float:
        return self.outcome.times.total

    @property
    def words(self) -> dict[str, str]:
        return {option.key: option.words for option in self.options}

    @property
    def rates(self) -> tuple[float, float]:
        """Tokens/s, and the share of the peak that useful work has."""
        work, many = find_work(self.config, find_size(self.config)[1]), self.config.train.micro_batches
        tokens = many * work.tokens * tokens_per_sample(self.config.model)
        cfg, share = self.config.model, find_estimate(self.config).work
        stacks = {"encoder": Blocks(share * cfg.layers), "decoder": Blocks(share * (cfg.decoder_layers or cfg.layers))}
        flops = many * training_flops(cfg, work, stacks)
        return tokens / self.seconds, flops / self.seconds / (self.hardware.flops * self.hardware.count)


@dataclass(frozen=True)
class Plan:
    recipe: Config  # as it was given
    config: Config  # with all sizes known, for the device of the plan
    hardware: Hardware
    candidates: list[Candidate]  # those that fit, the best first
    dimensions: dict[str, list[Option]]
    forbidden: list[Option]  # what would be tried if other mathematics were allowed
    notes: list[str]
    measured: int = 0  # candidates whose times were measured, the first ones
    scale: float = 1.0  # measured by computed times, for those that are not measured

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    def write(self, candidate: Candidate) -> Config:
        """The recipe with a candidate's choices; what only the data or the device would tell is left to them."""
        return replace(candidate.config, model=self.recipe.model, run=self.recipe.run)


def make_plan(recipe: Config, hardware: Hardware, approximate: bool = False) -> Plan:
    """Raises a `ConfigError` that says what would fit, where nothing does."""
    if recipe.model.own or recipe.data.own:
        raise ConfigError("a model or data of a program's own cannot be planned: a recipe does not describe them")
    if prod(recipe.parallel.axes().values()) > 1 and recipe.parallel.schedule != "1f1b":
        raise ConfigError(
            f"parallel.schedule = {recipe.parallel.schedule!r} is not planned here, as its gradients are old"
        )
    config, notes = complete_sizes(for_device(recipe, hardware.is_gpu))
    dimensions = list_dimensions(config, hardware, approximate)
    if next(list_parallel(config.parallel, hardware)) != config.parallel:
        notes.append("[parallel] of the recipe is not among the layouts that are tried, and is left out")
    tried = list(list_candidates(config, hardware, dimensions))
    found = [one for one in tried if one.fits]
    if not found:
        problems = dict.fromkeys(one.outcome.problem for one in tried)
        if not tried or "" in problems:
            raise ConfigError(explain_too_large(config, hardware, dimensions))
        raise ConfigError(f"there is no plan for {hardware.describe()}: {'; or: '.join(list(problems)[:NAMED])}")
    found += refine(config, min(found, key=lambda one: one.seconds), dimensions)
    fastest = min(one.seconds for one in found)
    found.sort(key=lambda one: (-one.own if one.seconds <= fastest * (1 + CLOSE) else 0, one.seconds))
    others = [] if approximate else list_forbidden(config, hardware, dimensions)
    return Plan(recipe, config, hardware, found, dimensions, others, notes)


def plan_run(recipe: Config, processes: int, gpu: bool) -> tuple[Config, str]:
    """The recipe as it is trained best on this machine by so many processes, and a line that says what was chosen."""
    plan = make_plan(recipe, replace(choose_hardware(""), count=processes) if gpu else make_cpu(processes))
    chosen = ", ".join(f"{key} = {words}" for key, words in plan.best.words.items() if words != OFF)
    return plan.write(plan.best), f"planned for {plan.hardware.describe()}: {chosen}"


def keep_plan(recipe: Config, run: Config) -> Config:
    """The recipe with what was chosen for it when a run of it began; as it is, if it has come to learn from another
    number of samples."""
    (key, size), train = find_size(run), run.train
    if size * train.micro_batches != find_size(recipe)[1] * recipe.train.micro_batches:
        return recipe
    kept = {name: getattr(train, name) for name in ("micro_batches", "eval_batches", "precision")}
    recipe = replace(recipe, train=change(recipe.train, **kept), data=change(recipe.data, **{key: size}))
    return replace(recipe, techniques=run.techniques, parallel=run.parallel)


def list_dimensions(config: Config, hardware: Hardware, approximate: bool) -> dict[str, list[Option]]:
    """The options by key, the recipe's own one first."""
    precision = config.train.precision
    if hardware.is_gpu and not hardware.has_bf16 and precision in ("auto", "bf16"):
        precision = "fp16"
    other = approximate and hardware.is_gpu and hardware.has_bf16 and precision not in ("auto", "bf16")
    precisions = [precision, *(["bf16"] if other else [])]
    found = {
        BATCH: [Option(BATCH, str(many), partial(set_batch, many=many)) for many in list_counts(config)],
        LAYOUT: [
            Option(LAYOUT, describe_parallel(one, hardware.count), partial(change, parallel=one))
            for one in list_parallel(config.parallel, hardware)
        ],
        PRECISION: [Option(PRECISION, one, partial(change_in, "train", precision=one)) for one in precisions],
    }
    return found | {
        f"techniques.{name}": list_technique(config, hardware, name, value, approximate)
        for name, value in vars(config.techniques).items()
    }


def list_technique(config: Config, hardware: Hardware, name: str, value: Any, approximate: bool) -> list[Option]:
    """The recipe's own options, and what they say themselves is worth trying. A technique that offers nothing is part
    of what is trained, and stays as it is; and so do all on a CPU."""
    key = f"techniques.{name}"
    own = config.techniques.find_kernels(hardware.is_gpu) if key == KERNELS else value
    tried = SECTIONS[name].list_choices(approximate, config.model) if hardware.is_gpu else []
    if not tried:
        return [Option(key, describe_section(own), partial(change_in, "techniques", **{name: value}))]
    values = [*([own] if own is not None else []), None, *tried]
    return [make_technique(key, one) for i, one in enumerate(values) if one not in values[:i]]


def make_technique(key: str, value: Any) -> Option:
    name = key.rpartition(".")[2]
    return Option(key, describe_section(value), partial(change_in, "techniques", **{name: value}))


SECTIONS: dict[str, type[Section]] = {
    name: next(part for part in get_args(hint) if isinstance(part, type) and issubclass(part, Section))
    for name, hint in get_type_hints(TechniquesConfig).items()
}


def list_forbidden(config: Config, hardware: Hardware, dimensions: dict[str, list[Option]]) -> list[Option]:
    wider = list_dimensions(config, hardware, approximate=True)
    known = {(option.key, option.words) for options in dimensions.values() for option in options}
    return [o for options in wider.values() for o in options if (o.key, o.words) not in known]


def list_counts(config: Config) -> list[int]:
    """Numbers of micro-batches into which the samples of an update can be cut, the recipe's own one first. Of very many
    those are enough that have no other factors than 2, 3 and 5."""
    own, total = config.train.micro_batches, find_size(config)[1] * config.train.micro_batches
    least = config.data.seq_len if config.data.task == "translation" else 1  # a sentence has to fit
    small = [number for number in range(1, min(isqrt(total), MOST_DIVIDED) + 1) if total % number == 0]
    found = {many for number in small for many in (number, total // number) if total // many >= least}
    if len(found) > MOST_COUNTS:
        found = {many for many in found if 30 ** many.bit_length() % many == 0}
    return [own, *sorted(found - {own})]


def set_batch(config: Config, many: int) -> Config:
    """As many samples in an update, and in an evaluation."""
    key, size = find_size(config)
    new = size * config.train.micro_batches // many
    batches = -(-config.train.eval_batches * size // new)
    train = replace(config.train, micro_batches=many, eval_batches=batches)
    return replace(config, train=train, data=change(config.data, **{key: new}))


def change_in(section: str, config: Config, **values: Any) -> Config:
    return change(config, **{section: change(getattr(config, section), **values)})


def describe_section(value: Any) -> str:
    """The options that are not the usual ones."""
    if value is None:
        return OFF
    usual = asdict(type(value)())
    changed = [f"{key} = {to_toml(one)}" for key, one in asdict(value).items() if one != usual[key]]
    return f"on ({', '.join(changed)})" if changed else "on"


def describe_parallel(parallel: Any, count: int) -> str:
    taken = {name: size for name, size in parallel.axes().items() if size > 1}
    words = [f"data {count // prod(taken.values())}", *(f"{name} {size}" for name, size in taken.items())]
    return " x ".join(words) + (", weights sharded" if parallel.data == "shard" and count > 1 else "")


def list_candidates(config: Config, hardware: Hardware, dimensions: dict[str, list[Option]]) -> Iterator[Candidate]:
    """All combinations that may be the best. The more micro-batches, the less memory and the more time."""
    keeping = dimensions[KEEPING]
    others = [options for key, options in dimensions.items() if key not in (BATCH, KEEPING)]
    counts = sorted(dimensions[BATCH], key=lambda option: int(option.words))
    for combination in product(*others):
        fitting, precision = 0, next(option for option in combination if option.key == PRECISION)
        for batch in counts:
            if fitting >= ENOUGH and int(batch.words) >= PER_GPU * hardware.count:
                break
            if not may_fit(apply(config, (batch, precision)), hardware):
                continue
            tried = list(try_keeping(config, hardware, (batch, *combination), keeping, dimensions))
            fitting += tried[0].fits
            yield from tried


def try_keeping(
    config: Config, hardware: Hardware, options: Sequence[Option], keeping: Sequence[Option],
    dimensions: dict[str, list[Option]],
) -> Iterator[Candidate]:  # fmt: skip
    """Everything kept, and what the recipe keeps; where not everything fits, also the fastest other way that does."""
    everything = min(keeping, key=lambda option: option.words != OFF)
    whole = try_options(config, hardware, [*options, everything], dimensions)
    yield whole
    if whole.outcome.problem:
        return
    enough = whole.fits
    for option in (option for option in keeping if option is not everything):
        is_own = option is keeping[0]
        if enough and not is_own:
            return
        candidate = try_options(config, hardware, [*options, option], dimensions)
        yield candidate
        enough |= candidate.fits and not is_own


def refine(config: Config, one: Candidate, dimensions: dict[str, list[Option]]) -> list[Candidate]:
    """Where a step keeps less, what it keeps is chosen block by block, for the fastest plan alone."""
    if one.words.get(KEEPING, OFF) == OFF or len(list_blocks(one.config.model)) > MOST_REFINED:
        return []
    values = SECTIONS[KEEPING.rpartition(".")[2]].refine(int(FILLED * one.hardware.memory))
    rest = [option for option in one.options if option.key != KEEPING]
    tried = ([*rest, make_technique(KEEPING, value)] for value in values)
    better = [try_options(config, one.hardware, options, dimensions) for options in tried]
    return [candidate for candidate in better if candidate.fits]


def try_options(
    config: Config, hardware: Hardware, options: Sequence[Option], dimensions: dict[str, list[Option]]
) -> Candidate:
    own = sum(dimensions[option.key][0].words == option.words for option in options if option.key in dimensions)
    try:
        config = apply(config, options)
        outcome = predict(config, hardware)
    except ConfigError as error:
        outcome = Outcome(problem=str(error))
    return Candidate(config, tuple(options), outcome, hardware, own)


def apply(config: Config, options: Sequence[Option]) -> Config:
    for option in options:
        config = option.apply(config)
    return config


def may_fit(config: Config, hardware: Hardware) -> bool:
    """Whether what comes into each block would fit by itself: a look that costs nothing."""
    size = find_size(config)[1] * (1 if config.data.task in ("translation", "images") else config.data.seq_len)
    each = config.model.width * find_way(config).element * len(list_blocks(config.model))
    return size * each <= hardware.memory * hardware.count


def explain_too_large(config: Config, hardware: Hardware, dimensions: dict[str, list[Option]]) -> str:
    """Why nothing fits, and what would: more of these GPUs, or others."""
    parts = [f"this recipe fits {hardware.describe()} in no way that was tried, with micro-batches as small as can be"]
    least = find_least(config, hardware, dimensions)
    if least is not None:
        parts.append(
            f"at the least a step takes {least.outcome.memory / 2**30:.1f} GiB of each GPU"
            f" ({least.words[LAYOUT]}), which has room for {FILLED * hardware.memory / 2**30:.1f} GiB"
        )
    if hardware.is_gpu:
        counts = (hardware.count * 2**power for power in range(1, 11))
        more = [replace(hardware, count=count) for count in counts if count <= MOST]
        others = [replace(gpu, count=hardware.count) for gpu in sorted(GPUS, key=lambda gpu: gpu.memory)]
        found = [next((one for one in some if is_enough(config, one)), None) for some in (others, more)]
        names = [one.describe() for one in found if one is not None]
        parts.append(f"it would fit {' or '.join(names)}" if names else "and none of the GPUs that are known would do")
    return "; ".join([*parts, "a smaller model, shorter sequences or less in micro-batches take less"])


def is_enough(config: Config, hardware: Hardware) -> bool:
    least = find_least(config, hardware, list_dimensions(config, hardware, approximate=False))
    return least is not None and least.fits


def find_least(config: Config, hardware: Hardware, dimensions: dict[str, list[Option]]) -> Candidate | None:
    """The choice that takes the least memory: the smallest micro-batches, and the least that is kept."""
    rest = [options[0] for key, options in dimensions.items() if key not in (BATCH, LAYOUT, KEEPING, KERNELS)]
    smallest = sorted(dimensions[BATCH], key=lambda option: -int(option.words))
    found = []
    for several in product(*(dimensions[key] for key in (LAYOUT, KERNELS, KEEPING))):
        for batch in smallest:
            one = try_options(config, hardware, (batch, *several, *rest), dimensions)
            if not one.outcome.problem:
                found.append(one)
                break
    return min(found, key=lambda one: one.outcome.memory, default=None)


def explain(plan: Plan) -> Iterator[str]:
    """A sentence for every choice, and for each other value that was possible for it."""
    for chosen in plan.best.options:
        others = [option for option in plan.dimensions[chosen.key] if option.words != chosen.words]
        if chosen.key == BATCH:
            near = sorted(others, key=lambda option: abs(int(option.words) - int(chosen.words)))[:NAMED]
            others = sorted(near, key=lambda option: int(option.words))
        few = len(others) <= 2 * NAMED
        judged = [f"{o.words}: {judge(plan, o)[1]}" for o in others] if few else [*explain_many(plan, others)]
        yield f"{chosen.key}: {chosen.words}" + (f"; {'; '.join(judged)}" if judged else ", as in the recipe")
    for option in plan.forbidden:
        yield f"{option.key}: {option.words} changes what is computed: {judge(plan, option)[1]}, by --approximate"


def explain_many(plan: Plan, options: Sequence[Option]) -> Iterator[str]:
    """The best of many, and for the others each reason once."""
    judged = sorted((judge(plan, option), option.words) for option in options)
    good = [(words, reason) for (seconds, reason), words in judged if seconds < inf]
    yield from (f"{words}: {reason}" for words, reason in good[:NAMED])
    if len(good) > NAMED:
        yield f"{len(good) - NAMED} others: slower than these"
    bad: dict[str, list[str]] = {}
    for (seconds, reason), words in judged:
        if seconds == inf:
            bad.setdefault(reason, []).append(words)
    yield from (f"{' and '.join(names)}: {reason}" for reason, names in bad.items())


def judge(plan: Plan, option: Option) -> tuple[float, str]:
    """What becomes of the best candidate with another option: the best one that has it, or else the same with it.
    Seconds, and the same in words."""
    found = next((one for one in plan.candidates if one.words.get(option.key) == option.words), None)
    base, limit = plan.best, FILLED * plan.hardware.memory / 2**30
    if found is None:  # by options that are judged at once
        base = next(one for one in plan.candidates if all(o in plan.dimensions[o.key] for o in one.options))
        options = [one for one in base.options if one.key != option.key]
        found = try_options(plan.config, plan.hardware, [*options, option], plan.dimensions)
        found = replace(found, outcome=found.outcome.scaled(plan.scale))
    gib = found.outcome.memory / 2**30
    if found.outcome.problem:
        return inf, found.outcome.problem
    if not found.fits:
        return inf, f"does not fit, with {gib:.1f} GiB of {limit:.1f}"
    ratio = found.seconds / base.seconds
    if abs(ratio - 1) <= CLOSE:
        return found.seconds, f"as fast, within {CLOSE:.0%}, in {gib:.1f} GiB"
    return found.seconds, f"{ratio:.2f} times the time, in {gib:.1f} GiB"
