"""The examination: its steps, in order, and in the end what will be used here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from streamoverlap.doctor import built, check, gpu_findings, gpus, host
from streamoverlap.doctor.findings import Finding, one_line
from streamoverlap.doctor.isolated import CallFailed, call

CPU_RANKS = 2
_LOOK, _MEASURE, _CHECK = 90.0, 180.0, 180.0  # seconds for each such step: what hangs becomes a failure
_CHECK_AREA = "check"
_NOT_LOADED = "the compiled part cannot be loaded"
_MEND = "mend what is found above first; `streamoverlap demo` tries the same with your sizes"
_REPORT = "do not use it here, and report this with the output of `streamoverlap doctor --json`"


@dataclass(frozen=True)
class Step:
    title: str
    run: Callable[[], list[Finding]]


class Examination:
    """Runs `steps` one by one; then `findings` has all of them, and `uses` says what will be used.

    `broken` is why the compiled part cannot be loaded; most cannot be looked at then.
    """

    def __init__(self, broken: BaseException | None = None) -> None:
        self.findings: list[Finding] = []
        self._broken = broken
        self._facts: gpus.Facts | None = None
        uses = "not known, see above" if broken is None else f"do not work: {_NOT_LOADED}"
        self.uses = {"cpu": uses, "cuda": uses}  # by kind of tensor

    def steps(self) -> list[Step]:
        steps = [
            Step("what is built", partial(built.look, self._broken)),
            Step("the machine", lambda: [*host.machine(), *host.environment()]),
        ]
        if self._broken is not None:
            skipped = Finding(_CHECK_AREA, "GPUs and results", "skipped", f"not looked at: {_NOT_LOADED}")
            return [*steps, Step("GPUs", lambda: [skipped])]
        return [
            *steps,
            Step("GPUs", self._look_at_gpus),
            Step("speed of GPUs and links", self._measure),
            Step("results on CPU ranks", self._check_cpu),
            Step("results on GPUs", self._check_gpus),
        ]

    def run(self, step: Step) -> None:
        """Adds what the step finds; an error is a finding too."""
        try:
            self.findings += step.run()
        except Exception as error:
            self.findings.append(Finding(_CHECK_AREA, step.title, "failure", f"cannot be told: {one_line(error)}"))

    def _look_at_gpus(self) -> list[Finding]:
        try:
            self._facts = call(gpus.look, timeout=_LOOK)
        except CallFailed as error:
            self.uses["cuda"] = "do not work: see GPUs above"
            advice = "see whether nvidia-smi and torch.zeros(1, device='cuda') work; if not, mend the driver first"
            return [Finding("GPUs", "GPUs", "failure", f"cannot be looked at: {error}", advice)]
        return gpu_findings.of_facts(self._facts)

    def _measure(self) -> list[Finding]:
        if not self._gpus():
            return []
        pairs = [(pair.first, pair.second) for pair in self._facts.pairs]
        try:
            speeds = call(gpus.measure, pairs, timeout=_MEASURE)
        except CallFailed as error:
            return [Finding("GPUs", "speed", "failure", f"cannot be measured: {error}", "see whether torch.mm works")]
        return gpu_findings.of_speeds(self._facts, speeds)

    def _check_cpu(self) -> list[Finding]:
        finding, self.uses["cpu"] = judge("cpu", CPU_RANKS, _outcomes("cpu", CPU_RANKS))
        return [finding]

    def _check_gpus(self) -> list[Finding]:
        world = self._gpus()
        if not world:
            if self._facts is not None:
                self.uses["cuda"] = f"not available: {self._facts.why_none}"
            return []
        finding, self.uses["cuda"] = judge("cuda", world, _outcomes("cuda", world))
        return [finding]

    def _gpus(self) -> int:
        return len(self._facts.gpus) if self._facts is not None else 0


def judge(device: str, world: int, outcomes: list[check.Outcome] | str) -> tuple[Finding, str]:
    """Of a check on `world` ranks (a text: why there is none): what was found, and what groups there will use."""
    ranks = f"{world} {'CPU rank' if device == 'cpu' else 'GPU'}{'s' * (world > 1)}"
    name = f"results on {ranks}"
    fails = f"do not work: see {name} above"
    if isinstance(outcomes, str):
        return Finding(_CHECK_AREA, name, "failure", outcomes, _MEND), fails
    trials = [trial for outcome in outcomes for trial in outcome.trials]
    errors = [f"rank {outcome.rank}: {outcome.error}" for outcome in outcomes if outcome.error]
    wrong = [f"rank {outcome.rank}: {trial}" for outcome in outcomes for trial in outcome.trials if trial.wrong]
    if wrong:
        return Finding(_CHECK_AREA, name, "failure", "\n".join([*wrong, *errors]), _REPORT), "give wrong results"
    if errors:
        return Finding(_CHECK_AREA, name, "failure", "\n".join(errors), _MEND), fails
    values = {"elements": sum(trial.elements for trial in trials), "ranks": world}
    found = f"{values['elements']:,} elements equal torch's exactly"
    fallback = outcomes[0].fallback
    if fallback is not None:
        found = f"{found}, but all calls ran serial: {fallback}"
        uses = f"run serial, right but not hidden: {fallback}"
        return Finding(_CHECK_AREA, name, "warning", found, values=values), uses
    tried = ", ".join(dict.fromkeys(trial.algorithm for trial in trials))
    uses = f"overlap on {'threads' if device == 'cpu' else 'streams and copy engines'} ({ranks} tried)"
    if world == 1:
        uses = "work in a group of one; to overlap exchanges takes more GPUs than 1"
    return Finding(_CHECK_AREA, name, "ok", f"{found} ({tried}; {', '.join(check.DTYPES)})", values=values), uses


def _outcomes(device: str, world: int) -> list[check.Outcome] | str:
    try:
        return call(check.run_ranks, device, world, timeout=_CHECK)
    except CallFailed as error:
        return str(error)
