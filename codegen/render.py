"""KernelSpec -> source text. The only jinja2 environments of the project: one per language of templates."""

from functools import cache

import jinja2

from octavo.codegen.kernel import KernelSpec
from octavo.compiler.version import VERSION

# Control lines are comments of the language, so that a template still reads as Python or C++.
_LINE_PREFIXES = {".py.jinja": "#%", ".cpp.jinja": "//%"}
_COMMENTS = {".py.jinja": "#", ".cpp.jinja": "//"}


def render(spec: KernelSpec) -> str:
    """The source of one kernel, after a line that names version, template, parameters and key.

    Templates see their parameters, `name` (the kernel's) and `args` (in call order). A parameter that the
    template uses and the spec lacks raises jinja2.UndefinedError.
    """
    parameters = " ".join(f"{name}={value}" for name, value in spec.params)
    header = (
        f"{_COMMENTS[_suffix(spec.template)]} octavo {VERSION} | {spec.template} | {parameters} | {spec.key}"
    )
    return f"{header}\n{render_template(spec.template, name=spec.name, args=spec.args, **dict(spec.params))}"


def render_template(template: str, **values: object) -> str:
    """A template below codegen/templates ("cpp/program.cpp.jinja") with the given values."""
    return _environment(_suffix(template)).get_template(template).render(values)


def template_names(folder: str) -> tuple[str, ...]:
    """Every template of one family, as render_template takes it."""
    return tuple(name for name in _environment(".py.jinja").list_templates() if name.startswith(f"{folder}/"))


def _suffix(template: str) -> str:
    for suffix in _LINE_PREFIXES:
        if template.endswith(suffix):
            return suffix
    raise ValueError(f"a template ends with one of {', '.join(_LINE_PREFIXES)}, got {template!r}")


@cache
def _environment(suffix: str) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("octavo.codegen"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        line_statement_prefix=_LINE_PREFIXES[suffix],
    )
