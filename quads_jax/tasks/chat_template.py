"""Renders chat templates of Hugging Face folders: a job of `worker_process`, run as a file.

A template is a program that came with downloaded files. Here it runs in jinja2's sandbox for immutable data, in a
process whose time and memory are bounded, so that loops and texts of any size end with an error.

The surroundings are those that templates are written for: blocks are trimmed and stripped on the left, `break` and
`continue` exist, `tojson` does not escape HTML, `raise_exception(text)` stops, and a {% generation %} block is what is
in it. `strftime_now(format)` is always of one day, since a prompt must not depend on when a run is continued.
"""

import datetime
import functools
import json
from collections.abc import Callable
from typing import Any

LONGEST = 2**20  # characters of a rendered prompt
TODAY = datetime.datetime(2024, 7, 26)  # what Llama's templates take without a clock


def load() -> Callable[[dict], list]:
    """The function that renders {"template", "variables", "prompts"}: of each prompt [true, text] or [false, fault]."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(text: str) -> None:
        raise jinja2.TemplateError(text)

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": TODAY.strftime}
    compiled = functools.lru_cache(maxsize=4)(sandbox.from_string)

    def rendered(template: Any, prompt: str, variables: dict[str, Any]) -> str:
        messages = [{"role": "user", "content": prompt}]
        pieces, length = [], 0
        for piece in template.generate(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, **variables
        ):
            length += len(piece)
            if length > LONGEST:
                raise ValueError(f"it gives more than {LONGEST} characters")
            pieces.append(piece)
        return "".join(pieces)

    def render(asked: dict) -> list:
        template = compiled(asked["template"])
        results = []
        for prompt in asked["prompts"]:
            try:
                results.append([True, rendered(template, prompt, asked["variables"])])
            except Exception as error:
                results.append([False, f"{type(error).__name__}: {error}"])
        return results

    return render
