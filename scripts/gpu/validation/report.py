"""What a section found, and the two files that tell it."""

import json
import math

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


class Result:
    """One section. Checks decide whether it passed; figures are measurements, with what was expected beside them."""

    def __init__(self, name, limit_s):
        self.name = name
        self.limit_s = limit_s
        self.status = None
        self.reason = ""
        self.seconds = 0.0
        self.checks = []
        self.figures = []
        self.notes = []

    def check(self, name, ok, detail=""):
        self.checks.append({"name": name, "ok": bool(ok), "detail": str(detail)})
        return bool(ok)

    def figure(self, name, value, unit, expected=None, at_most=None, at_least=None):
        """A measurement. `within` is None where there is nothing to hold it against."""
        if value is not None and not math.isfinite(value):
            value = None
        within = None
        if value is not None and (at_most is not None or at_least is not None):
            within = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
            bounds = [f"<= {at_most:g}" for _ in [0] if at_most is not None] + [f">= {at_least:g}" for _ in [0] if at_least is not None]
            expected = expected or " and ".join(bounds)
        self.figures.append({"name": name, "value": value, "unit": unit, "expected": expected, "within": within})

    def note(self, text):
        self.notes.append(text)

    def has_failed(self):
        return self.status == FAILED or self.status is None and not all(check["ok"] for check in self.checks)

    def finish(self, seconds):
        """Sets the status that the checks ask for, unless something has gone wrong before."""
        self.seconds = seconds
        if self.status is None:
            wrong = [check for check in self.checks if not check["ok"]]
            self.status = FAILED if wrong else PASSED
            self.reason = "; ".join(check["name"] + (f" ({check['detail']})" if check["detail"] else "") for check in wrong)
            if not self.checks and not self.figures:
                self.status, self.reason = FAILED, "it found nothing at all"

    def as_dict(self):
        return {
            "name": self.name,
            "status": self.status,
            "reason": self.reason,
            "seconds": round(self.seconds, 2),
            "limit_s": self.limit_s,
            "checks": self.checks,
            "figures": self.figures,
            "notes": self.notes,
        }


class Report:
    """All sections, and what they ran on."""

    def __init__(self, head):
        self.head = head
        self.results = []

    def counts(self):
        return {status: sum(1 for result in self.results if result.status == status) for status in (PASSED, FAILED, SKIPPED)}

    def as_dict(self):
        metrics = [
            {"name": f"{result.name}.{figure['name']}", "value": figure["value"], "unit": figure["unit"], "expected": figure["expected"],
             "within": figure["within"], "baseline": None, "ratio": None, "budget": None}
            for result in self.results
            for figure in result.figures
        ]
        return {**self.head, **self.counts(), "metrics": metrics, "sections": [result.as_dict() for result in self.results]}

    def write(self, directory):
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in (("report.json", json.dumps(self.as_dict(), indent=1) + "\n"), ("report.md", self.markdown())):
            # Whole or not at all: the run may be ended from outside at any moment.
            new = directory / f".{name}.new"
            new.write_text(text, encoding="utf-8")
            new.replace(directory / name)

    def markdown(self):
        head = self.head
        lines = [f"# Validation: {head['device']}", ""]
        if head["simulated"]:
            lines += ["**Simulated.** No GPU took part: figures are those of simgpu on this machine's processor and say nothing of a GPU.", ""]
        for key in ("commit", "date", "driver", "cuda", "torch", "python", "kernel", "cpus", "load_at_start", "libc"):
            if head.get(key) is not None:
                lines.append(f"- {key}: {head[key]}")
        lines += [f"- took: {head.get('seconds', 0):.0f} s of {head.get('budget_s', 0):.0f} s", ""]
        lines += ["| section | status | seconds | |", "|---|---|---:|---|"]
        lines += [f"| {r.name} | {r.status} | {r.seconds:.1f} | {cell(r.reason, 300)} |" for r in self.results]
        for result in self.results:
            if result.status == SKIPPED:
                continue
            lines += ["", f"## {result.name}: {result.status}", ""]
            if result.reason:
                lines += ["```text", result.reason.replace("```", "'''"), "```", ""]
            if result.checks:
                lines += ["| check | | |", "|---|---|---|"]
                lines += [f"| {cell(c['name'])} | {'ok' if c['ok'] else '**wrong**'} | {cell(c['detail'], 400)} |" for c in result.checks]
                lines.append("")
            if result.figures:
                lines += ["| figure | value | unit | expected | |", "|---|---:|---|---|---|"]
                for f in result.figures:
                    mark = {None: "", True: "ok", False: "missed"}[f["within"]]
                    lines.append(f"| {cell(f['name'])} | {number(f['value'])} | {f['unit']} | {cell(f['expected'] or '')} | {mark} |")
                lines.append("")
            lines += [f"- {note}" for note in result.notes]
        return "\n".join(lines) + "\n"


def cell(text, most=200):
    text = " ".join(str(text).split()).replace("|", "\\|")
    return text if len(text) <= most else text[: most - 4] + " ..."


def number(value):
    if value is None:
        return "-"
    if isinstance(value, int) or float(value).is_integer() and abs(value) >= 1000:
        return f"{int(value)}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
