"""Techniques behind their seam: who names them, and one that is written in this file alone and uses every hook."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import stretto.build
import stretto.hf
from stretto import checkpoint, graphs, techniques
from stretto.batch import IGNORE, Batch, shape_of
from stretto.bench import worker
from stretto.bench.contest import make_recipe
from stretto.bench.workloads import WORKLOADS, fit_to_device
from stretto.cli import app
from stretto.config import Config, OptimConfig, build_config, dump_config
from stretto.errors import CheckpointError, ConfigError
from stretto.hf.acceleration import techniques_of
from stretto.mesh import Mesh
from stretto.model import Block, Model, build_model, sites
from stretto.optim import FlatAdamW
from stretto.parallel.sequence import SequenceParallel
from stretto.report import read_events
from stretto.runtime import Runtime
from stretto.score import measure
from stretto.step import Update
from stretto.techniques import load_all
from stretto.techniques.foreign import Foreign, Switch
from stretto.techniques.technique import At, Context, Sites, Technique
from stretto.train import train
from stretto.trained import load_trained
from tests.runs import MakeConfig, explain_graphs, losses

ROOT, CPU = Path(__file__).parents[1], torch.device("cpu")

# Who names a technique.

NAMES = {
    "layer_drop": r"layer_drop|LayerDrop|[Ll]ayer[- ][Dd]rop",
    "standardize": r"[Ss]tandardi[sz]|\bPressure\b|\bAffine\b",
    "fused": r"\b[Ff]used\b|\bFused[A-Z]|_fused\b",
    "lean": r"\b[Ll]ean\b|\bLean[A-Z]|_lean\b",
    "fp8": r"techniques[./]fp8|\bFp8|\bEight\b|\bfp8=|\"fp8\"",
    "pipeline": r"parallel\.pipeline\b|\"pipeline\"|\bPipeline\b",
    "sequence": r"parallel\.sequence\b|sequence_(method|layout|keep|heads)|[Ss]equence[- ]?[Pp]arallel|Splitter",
}
# Torch has a word for its own optimizers that is ours for a technique.
TORCHS = r"torch's\s+fused|torch that are fused|fused=True|adamw_torch_fused|[Ff]used\s+(kernel|optimizer|AdamW)"
SHARED = ("stretto/config.py", "stretto/techniques/__init__.py")
NAMES_NONE = ("train", "step", "evaluate", "checkpoint", "report", "execute", "graphs", "data/")
KNOWN = {
    "stretto/bench/contest.py": "the recipes of contestants with kernels of ours and without",
}


def read_package() -> dict[str, str]:
    """The sources that should know no technique but their own; kernels are parts of techniques."""
    paths = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "stretto").rglob("*.py"))}
    return {name: path.read_text(encoding="utf-8") for name, path in paths.items() if "/ops/" not in name}


def find_named(source: str) -> set[str]:
    source = re.sub(TORCHS, "", source)
    return {technique for technique, pattern in NAMES.items() if re.search(pattern, source)}


def find_offences(sources: dict[str, str], known: Sequence[str] = tuple(KNOWN)) -> list[str]:
    """Files that name a technique other than its own, of what it does and what it costs, the options and the order."""
    homes = {cls.name: cls.__module__.replace(".", "/") for cls in load_all()}
    return [
        f"{name} names {technique}"
        for name, source in sources.items()
        for technique in sorted(find_named(source))
        if name not in (*known, *SHARED, f"{homes[technique]}.py", f"{homes[technique]}_costs.py")
    ]


def test_each_technique_is_named_in_few_files() -> None:
    sources = read_package()
    assert {cls.name for cls in load_all()} == set(NAMES) and len(sources) > 60
    assert find_offences(sources) == []
    for technique in NAMES:
        found = [name for name, source in sources.items() if technique in find_named(source) and name not in KNOWN]
        assert 2 <= len(found) <= 3, (technique, found)
    for name, source in sources.items():
        if name.removeprefix("stretto/").startswith(NAMES_NONE):
            assert find_named(source) == set() and name not in KNOWN, name


@pytest.mark.parametrize("entry", KNOWN)
def test_an_exception_is_needed(entry: str) -> None:
    others = [name for name in KNOWN if name != entry]
    assert find_offences({entry: (ROOT / entry).read_text(encoding="utf-8")}, others), "leave it out of KNOWN"


@pytest.mark.parametrize(
    "planted",
    [
        "if config.techniques.layer_drop is not None:",
        "# blocks that layer dropping leaves out",
        "from stretto.techniques.layer_drop import LayerDrop",
        "run(parts.standardize)",
        "pressure: Pressure | None = None",
        'raise ConfigError("[techniques.fused] is off")',
        "isinstance(block, FusedBlock)",
        "if config.techniques.lean is not None:",
        "if config.techniques.fp8 is not None:",
        "if cfg.parallel.sequence > 1:",
        "split = Splitter(cfg)",
        "from stretto.parallel.pipeline import Pipeline",
        "kept = cfg.sequence_keep",
    ],
)
def test_a_planted_name_is_found(planted: str) -> None:
    source = (ROOT / "stretto" / "train.py").read_text(encoding="utf-8")
    assert find_offences({"stretto/train.py": source}) == []
    assert len(find_offences({"stretto/train.py": f"{source}\n{planted}\n"})) == 1


def test_torchs_own_word_is_no_offence() -> None:
    assert (
        find_named("AdamW(groups, fused=True)  # torch's fused\n# kernel, and what the fused optimizer reads") == set()
    )


# A technique of a file that nothing else knows.


@dataclass(frozen=True)
class Options:
    factor: float = 2.0  # of what norms give
    wrong: bool = False
    obstacle: bool = False


CHOSEN: list[Options] = []  # those of the technique; empty: it is off
CALLS: list[tuple[str, Any]] = []  # hook -> what it was given


class Gain(nn.LayerNorm):
    factor: float

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * super().forward(x)


class OwnAdamW(FlatAdamW):
    """Torch's rule; it can be told apart."""


def note_forward(model: nn.Module, args: tuple[Batch]) -> None:
    labels = args[0].labels
    first = int(labels[0]) if labels.device.type == "cpu" else IGNORE  # nothing may wait for a GPU here
    CALLS.append(("forward", (model.training, first)))


class Probe(Technique):
    name, exact, changes_function, by_block = "probe", False, True, True
    cfg: Options

    def __init__(self, cfg: Options, context: Context) -> None:
        super().__init__(cfg, context)
        self.updates = 0
        self.switches: Mapping[str, Sequence[Switch]] = {}  # layers of a model of others

    @classmethod
    def find_options(cls, config: Config, device: torch.device) -> Options | None:
        assert isinstance(config, Config) and isinstance(device, torch.device)
        return CHOSEN[0] if CHOSEN else None

    @classmethod
    def read_options(cls, value: Any) -> Options:
        return Options(**value)

    @property
    def key(self) -> str:
        return "probe"

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def gaps(self) -> bool:
        return True

    def check(self, others: Sequence[Technique]) -> list[str]:
        CALLS.append(("check", [other.name for other in others]))
        return ["it is wrong"] if self.cfg.wrong else []

    @property
    def num_kinds(self) -> int:
        return 3

    def apply(self, model: nn.Module, sites: Sites) -> None:
        CALLS.append(("apply", all(p.is_meta for p in model.parameters())))
        for norm in map(model.get_submodule, sites["norm"]):
            norm.__class__, norm.factor = Gain, self.cfg.factor  # type: ignore[assignment]
        model.register_forward_pre_hook(note_forward)

    def attach(self, model: Foreign) -> None:
        """The last layer adds more to the stream, by the factor."""
        self.switches = model.switch_layers(self.name, lambda switches: None)

    def pattern(self) -> dict[str, Any]:
        return {stack: {i: s.factor for i, s in enumerate(of)} for stack, of in self.switches.items()}

    def start_value(self, name: str, value: Tensor) -> Tensor:
        CALLS.append(("start_value", (name, value.shape)))
        return value / 2 if name == "embedding.token.weight" else value

    def build_optimizer(self, groups: list[dict[str, Any]], cfg: OptimConfig) -> OwnAdamW:
        CALLS.append(("build_optimizer", sum(len(group["params"]) for group in groups)))
        return OwnAdamW(groups, cfg.lr, (cfg.beta1, cfg.beta2), cfg.eps)

    def build_executor(self, model: Model, update: Update, rt: Runtime, optim: OptimConfig) -> None:
        CALLS.append(("build_executor", update.optimizer))

    def why_not_by_module(self) -> str:
        return "it looks at all norms"

    def saves(self, name: str) -> None:
        CALLS.append(("saves", name))

    def dump(self) -> dict[str, Tensor]:
        return {"probe": torch.tensor([self.updates])}

    def take_part(self, stored: checkpoint.Stored) -> checkpoint.Stored:
        CALLS.append(("take_part", stored.others["probe"].read().tolist()))
        return stored

    def prepare(self, batch: Batch, at: At) -> Batch:
        """The first token is not predicted."""
        CALLS.append(("prepare", at))
        labels = torch.cat([batch.labels.new_tensor([IGNORE]), batch.labels[1:]])
        return replace(batch, labels=labels, counts=replace(batch.counts, labels=int((labels != IGNORE).sum())))

    def random_keys(self, others: Sequence[Technique]) -> tuple[int, ...]:
        return (7, len(others))

    def begin(self, step: int, share: float, scaler: torch.amp.GradScaler | None) -> None:
        assert isinstance(scaler, torch.amp.GradScaler) or self.context.model is None
        CALLS.append(("begin", (step, share)))
        for switches in self.switches.values():
            for number, switch in enumerate(switches, 1):
                switch.factor = self.cfg.factor if number == len(switches) else 1.0

    def end(self, step: int) -> None:
        CALLS.append(("end", step))
        self.updates += 1

    def find_obstacles(self) -> list[str]:
        return [" counts on the host"] if self.cfg.obstacle else []

    def graph_key(self, step: int) -> int:
        return step // 3

    def metrics(self, num_batches: int) -> dict[str, float]:
        return {"probe_updates": float(self.updates)}

    def take_notes(self) -> list[str]:
        return [f"update {self.updates} of the probe"] if self.updates == 4 else []

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        CALLS.append(("load_state_dict", dict(state)))
        self.updates = state.get("updates", 0)

    @classmethod
    def identity(cls, cfg: Options | None) -> dict[str, Any] | None:
        return None if cfg is None else {"factor": cfg.factor}

    def describe(self) -> str:
        return f"norms times {self.cfg.factor:g}"

    def fold(self, model: nn.Module) -> Model:
        assert isinstance(model, Model)
        norms = tuple(f"{name}." for name in sites(model)["norm"])
        state = {
            key: value * (self.cfg.factor if key.startswith(norms) else 1) for key, value in model.state_dict().items()
        }
        plain = build_model(model.cfg).to_empty(device="cpu").eval()
        plain.load_state_dict(state)
        return plain


def calls(*hooks: str) -> list[Any]:
    """What these hooks were given; with several of them, which ones were called."""
    found = [(name, given) for name, given in CALLS if name in hooks]
    return [given if len(hooks) == 1 else name for name, given in found]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It is in the order, behind all others, and on."""
    monkeypatch.setattr(techniques, "ORDER", (*techniques.ORDER, __name__))
    CALLS.clear()
    CHOSEN[:] = [Options()]
    yield
    CHOSEN.clear()


def run(make_config: MakeConfig, folder: Path, steps: int = 6, resume: bool = False, **changes: Any) -> Path:
    """Another technique is on, which does nothing at this theta."""
    options: dict[str, Any] = {
        "train__steps": steps, "train__micro_batches": 2, "train__eval_every": 3, "optim__schedule": "constant",
        "techniques__layer_drop": {"theta": 1.0}, "run__dir": str(folder),
    }  # fmt: skip
    return train(make_config(**options | changes), resume)


def test_a_technique_in_a_test_uses_every_hook(
    probe: None, make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {name for name, value in vars(Technique).items() if isinstance(value, bool)}
    hooks = {name for name in vars(Technique) if not name.startswith("_")} - facts
    assert hooks <= vars(Probe).keys() and len(hooks) > 18

    folder = run(make_config, tmp_path / "run")
    assert set(map(tuple, calls("check"))) == {("layer_drop",)} and calls("apply")[0] is True
    assert calls("begin") == [(step, 0.5) for step in range(6)] and calls("end") == [*range(6)]
    passes = [(name, given) for name, given in CALLS if name in ("begin", "forward", "end")]
    trained = [name for name, given in passes if name != "forward" or given[0]]
    assert trained == ["begin", "forward", "forward", "end"] * 6
    prepared = calls("prepare")
    assert [at for at in prepared if at.training] == [At(step, 2 * step + i) for step in range(6) for i in (0, 1)]
    assert [at for at in prepared if not at.training] == [At(0, i, training=False) for i in (0, 1)] * 2
    assert {first for _, first in calls("forward")} == {IGNORE} and len(calls("forward")) == 12 + 4
    assert [type(optimizer) for optimizer in calls("build_executor")] == [OwnAdamW]
    lines = {event["step"]: event["probe_updates"] for event in read_events(folder) if "eval_loss" in event}
    assert lines == {3: 3.0, 6: 6.0}
    out = capsys.readouterr().out
    assert "norms times 2" in out and out.count("update 4 of the probe") == 1


def test_its_state_comes_back_and_its_identity_is_compared(
    probe: None, make_config: MakeConfig, tmp_path: Path
) -> None:
    whole, parts = run(make_config, tmp_path / "whole"), run(make_config, tmp_path / "parts", steps=3)
    assert checkpoint.load(parts / "checkpoints", 3).state["techniques"] == {"probe": {"updates": 3}}
    assert calls("load_state_dict") == []
    for other, words in ([Options(factor=3.0)], r"\{'factor': 3\.0\}"), ([], "None"):
        CHOSEN[:] = other
        with pytest.raises(CheckpointError, match=rf"techniques\.probe was \{{'factor': 2\.0\}}, is {words}"):
            run(make_config, parts, resume=True)
    CHOSEN[:] = [Options()]
    run(make_config, parts, resume=True)
    assert calls("load_state_dict") == [{"updates": 3}] and calls("take_part") == [[3]]
    assert [event["probe_updates"] for event in read_events(parts) if "eval_loss" in event] == [3.0, 6.0]
    one, two = (checkpoint.load(folder / "checkpoints", 6) for folder in (whole, parts))
    assert all(torch.equal(one.weights[key], two.weights[key]) for key in one.weights)


def test_what_it_builds_is_used(probe: None, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    gradients: list[tuple[Any, ...]] = []
    choose = stretto.build.choose_gradients
    monkeypatch.setattr(torch, "compile", lambda forward: compiled.append(forward.__self__) or forward)
    monkeypatch.setattr(stretto.build, "choose_gradients", lambda *args: gradients.append(args) or choose(*args))

    def build() -> stretto.build.Trainable:
        return stretto.build.build(make_config(model__vocab=64, train__compile=True), Runtime(CPU), Mesh())

    parts = build()
    weights = dict(parts.model.named_parameters())
    assert isinstance(parts.update.optimizer, OwnAdamW) and calls("build_optimizer") == [len(weights)]
    assert calls("start_value") == [(name, p.shape) for name, p in weights.items()]
    assert parts.update.random_keys == (7, 0) and parts.techniques.num_kinds == 3
    assert parts.techniques.parameter_dtype == torch.bfloat16
    assert compiled == [block for block in parts.model.modules() if isinstance(block, Block)] and len(compiled) == 2
    assert [given[2] for given in gradients] == [True], "gaps"
    CHOSEN.clear()
    plain = build()
    for name, p in plain.model.named_parameters():
        assert torch.equal(weights[name], p / 2 if name == "embedding.token.weight" else p)
    assert not isinstance(plain.update.optimizer, OwnAdamW) and compiled[2:] == [plain.model]


def test_its_reasons_are_given_before_anything_is_made(
    probe: None, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    CHOSEN[:] = [Options(wrong=True)]
    config = make_config()
    with pytest.raises(ConfigError, match=r"^probe: it is wrong$"):
        train(config)
    assert not Path(config.run.dir).exists()
    CHOSEN[:] = [Options()]
    with monkeypatch.context() as patch:
        patch.setattr(Probe, "splits_sequences", True)
        with pytest.raises(ConfigError, match=r"techniques\.layer_drop: gate = 'sample' would need other sequences"):
            train(make_config(techniques__layer_drop={"gate": "sample"}))
    sequence = object.__new__(SequenceParallel)
    sequence.split = SimpleNamespace(group=SimpleNamespace(rank=lambda: 1))  # type: ignore[assignment]
    known = Probe(CHOSEN[0], Context(None, CPU, "fp32"))
    assert sequence.random_keys([known]) == (1,)
    monkeypatch.setattr(Probe, "drops_by_place", True)
    assert sequence.random_keys([known]) == ()


def test_the_log_has_its_obstacles(probe: None, make_config: MakeConfig) -> None:
    config = make_config(techniques__fused=False)
    assert explain_graphs(config) == [], "it has an optimizer that can be recorded"
    CHOSEN[:] = [Options(obstacle=True)]
    assert explain_graphs(config) == ["CUDA graphs: off: probe counts on the host"]
    with pytest.raises(ConfigError, match=r"train\.graphs: they need a GPU; probe counts on the host"):
        train(make_config(train__graphs="on"))


class Recorder:
    """Does the work each time, and keeps what a recorder would know of it."""

    made: list[Recorder]  # by one executor

    def __init__(self, work: Any, prepare: Any, memory: Any) -> None:
        self.work = work
        self.seen: list[Any] = []  # shapes that would be recorded now
        self.forgotten: list[int] = []  # how many there were each time that all were forgotten
        self.made.append(self)

    def run(self, *batches: Batch, launched: bool = False) -> tuple[Tensor, ...]:
        if not launched:
            self.seen.append(tuple(map(shape_of, batches)))
        return self.work(*batches)

    def forget(self) -> None:
        self.forgotten.append(len(self.seen))
        self.seen.clear()


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """CUDA graphs on a CPU, but for the recording itself."""
    monkeypatch.setattr(stretto.build, "_find_obstacles", lambda config, context, active: active.find_obstacles())
    monkeypatch.setattr(graphs, "Memory", lambda: SimpleNamespace(seconds=0.0))
    monkeypatch.setattr(graphs, "Recorder", Recorder)
    monkeypatch.setattr(Recorder, "made", [], raising=False)
    return Recorder.made


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_another_key_forgets_what_was_recorded(
    probe: None, recorders: list[Recorder], make_config: MakeConfig, tmp_path: Path, micro_batches: int
) -> None:
    changes: dict[str, Any] = {
        "train__micro_batches": micro_batches, "data__join_documents": True, "techniques__layer_drop": False,
    }  # fmt: skip
    launched = run(make_config, tmp_path / "off", train__graphs="off", **changes)
    assert recorders == []
    recorded = run(make_config, tmp_path / "on", train__graphs="on", **changes)
    assert losses(recorded) == losses(launched) and len(losses(recorded)) == 6
    whole, passes, update = recorders
    used, unused = (whole, passes) if micro_batches == 1 else (passes, whole)
    assert used.forgotten == [0, 3 * micro_batches] and len(used.seen) == 3 * micro_batches, "steps 0 and 3 begin anew"
    assert unused.forgotten == [0, 0] and len(update.seen) == (0 if micro_batches == 1 else 6)


@pytest.mark.gpu
def test_its_updates_are_replayed(
    probe: None, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays, replay = list[object](), torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(graph) or replay(graph))
    changes: dict[str, Any] = {
        "run__device": "cuda", "run__deterministic": True, "techniques__fused": False, "data__join_documents": True,
        "train__micro_batches": 1,
    }  # fmt: skip
    launched = run(make_config, tmp_path / "off", train__graphs="off", **changes)
    assert not replays
    recorded = run(make_config, tmp_path / "on", train__graphs="on", **changes)
    assert losses(recorded) == losses(launched)
    assert len(replays) == 4 and len(set(replays)) == 2, "of each three steps the first is launched"


def test_a_benchmark_has_it(
    probe: None, recorders: list[Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, found = "gpt2_small_1x1024", []

    def measure_little(contestant: Any, work: Any, *rest: Any) -> dict[str, Any]:
        found.append(contestant)
        return {"losses": [float(contestant.step(i)) for i in range(2)], "flops": work.flops}

    monkeypatch.setattr(worker, "measure", measure_little)
    tree = make_recipe(fit_to_device(WORKLOADS[name], "cpu"), "stretto plain")
    for graphs_are in ("off", "on"):
        config = build_config(tree | {"train": {"graphs": graphs_are}, "run": {"device": "cpu"}})
        (tmp_path / "recipe.toml").write_text(dump_config(config))
        CALLS.clear()
        numbers = worker.run(name, "stretto plain", 2, tmp_path / "recipe.toml")
        assert all(loss > 0 for loss in numbers["losses"]) and numbers["flops"] > 0
        assert calls("begin") == [(0, 1.0), (1, 1.0)] and calls("end") == [0, 1]
        assert {first for _, first in calls("forward")} == {IGNORE}
        assert [at for at in calls("prepare") if at.index < 2][-2:] == [At(0, 0), At(1, 1)]
    assert [contestant.records for contestant in found] == [False, True]
    assert found[1].passes == graphs.TIMES + 2 + 2 * (3 - 1) and len(recorders) == 3


def test_its_fold_is_exported(probe: None, make_config: MakeConfig, tmp_path: Path) -> None:
    folder = run(make_config, tmp_path / "run")
    scores = measure(folder, beam=1)
    outcome = CliRunner().invoke(app, ["export", str(folder), str(tmp_path / "folded"), "--fold"])
    assert outcome.exit_code == 0, outcome.output
    CHOSEN.clear()
    folded = load_trained(tmp_path / "folded", CPU).model
    assert not any(isinstance(module, Gain) for module in folded.modules())
    assert measure(tmp_path / "folded", beam=1)["eval_loss"] == pytest.approx(scores["eval_loss"], abs=1e-5)
    assert measure(folder, beam=1)["eval_loss"] != pytest.approx(scores["eval_loss"], abs=1e-2), "as a plain model"


def test_a_hugging_face_model_has_it(probe: None) -> None:
    """Through `accelerate`, by its name; what it decides is what layers do and what recordings are told apart by."""
    hf: Any = pytest.importorskip("transformers")
    config = hf.GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=2, n_positions=16, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    torch.manual_seed(0)
    plain = hf.GPT2LMHeadModel(config).train()
    model, ids = stretto.accelerate(copy.deepcopy(plain), probe={"factor": 3.0}), torch.arange(12).view(2, 6)
    assert calls("check") == [["fused"]]
    with pytest.raises(ValueError, match=r"probe depends on the step: call stretto\.hf\.set_step"):
        model(ids)
    stretto.hf.set_step(model, 4, share=0.5, steps=9)
    (technique,) = [each for each in techniques_of(model) if each.name == "probe"]
    assert calls("begin") == [(4, 0.5)] and technique.context.steps == 9
    assert techniques_of(model).pattern() == {"probe": {"transformer": {0: 1.0, 1: 3.0}}}
    last = plain.transformer.h[1]
    last.register_forward_hook(enlarge)
    assert torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-5)
    assert not any(p.grad is None for p in learn_once(model, ids).parameters())
    with pytest.raises(ValueError, match="probe: it is wrong"):
        stretto.accelerate(copy.deepcopy(plain), probe={"wrong": True})
    with pytest.raises(TypeError, match=r"there is no technique 'prob'; there are: .*probe"):
        stretto.accelerate(copy.deepcopy(plain), prob=True)


def enlarge(layer: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
    """Some versions of transformers return a tuple."""
    stream = args[0] + 3 * ((out if isinstance(out, Tensor) else out[0]) - args[0])
    return stream if isinstance(out, Tensor) else (stream, *out[1:])


def learn_once(model: nn.Module, ids: Tensor) -> nn.Module:
    model(ids, labels=ids).loss.backward()
    return model
