"""What was asked and answered in a trial, case by case, as a page that can be kept."""

import textwrap
import time

WIDTH = 100
# Of an answer; the rest says nothing new.
LINES = 60


class Transcript:
    """Commands, answers and what was found, each with the seconds since its case began."""

    def __init__(self):
        self.cases, self.begun = [], time.monotonic()

    def case(self, name, about):
        """From here on it is about this."""
        self.cases.append({"name": name, "about": about, "lines": [], "verdict": None})
        self.begun = time.monotonic()

    def verdict(self, text):
        self.cases[-1]["verdict"] = f"{text} ({time.monotonic() - self.begun:.1f} s)"

    def command(self, words, given=None, said=""):
        """A command, what it was given on its standard input, and what it answered."""
        self.add("$ " + words)
        for text in (given, said):
            lines = (text or "").strip("\n").splitlines()
            for line in lines[:LINES]:
                self.add("  " + line.replace("```", "'''"), stamped=False)
            if len(lines) > LINES:
                self.add(f"  ... {len(lines) - LINES} more lines", stamped=False)

    def note(self, text):
        """What was done or found otherwise."""
        self.add("# " + text)

    def say(self, text):
        """The same, for who looks on as well."""
        print(f"  {text}", flush=True)
        self.note(text)

    def add(self, line, stamped=True):
        if not self.cases:
            return
        stamp = f"{time.monotonic() - self.begun:6.1f}  " if stamped else " " * 8
        self.cases[-1]["lines"] += textwrap.wrap(
            line, WIDTH, initial_indent=stamp, subsequent_indent=" " * 12, break_on_hyphens=False, drop_whitespace=False, replace_whitespace=False
        ) or [stamp.rstrip()]

    def page(self, title, about, figures=()):
        """All of it in Markdown; `figures` are lines of a table."""
        text = [f"# {title}", "", *textwrap.wrap(about, WIDTH, break_on_hyphens=False, break_long_words=False), ""]
        for case in self.cases:
            text += [f"## {case['name']}", "", *textwrap.wrap(case["about"], WIDTH), "", "```text", *(line.rstrip() for line in case["lines"]), "```", ""]
            # A reason of a failure may have several lines.
            text += [*textwrap.wrap(" ".join((case["verdict"] or "not ended").split()), WIDTH, break_on_hyphens=False), ""]
        if figures:
            text += ["## figures", "", "```text", *(line.rstrip() for line in figures), "```", ""]
        return "\n".join(text).rstrip() + "\n"
