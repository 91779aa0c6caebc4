import jax
import pytest

from mars_jax import cli


@pytest.mark.parametrize(
    ("environment", "configured", "expected"),
    [
        ({"HOME": "/home/u"}, None, "/home/u/.cache/mars_jax"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "/fast"}, None, "/fast/mars_jax"),
        ({"JAX_COMPILATION_CACHE_DIR": ""}, None, None),
        ({"HOME": "/home/u"}, "/own", "/own"),
    ],
)
def test_compiled_programs_are_kept_where_nobody_said_otherwise(monkeypatch, environment, configured, expected):
    for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", configured)
    try:
        cli.keep_compiled_programs()
        assert jax.config.jax_compilation_cache_dir == expected
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
