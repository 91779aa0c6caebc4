"""`python -m mars_jax.compile`: compile a step for a TPU slice on a machine without one, and say whether it fits."""

import argparse
import dataclasses
import json
import logging
import sys
from pathlib import Path

from mars_jax import cli
from mars_jax.errors import UserError

log = logging.getLogger(__name__)

GIB = 2**30


def build_parser() -> argparse.ArgumentParser:
    parser = cli.parser(
        "compile",
        "Compile the step of a configuration for a TPU slice, on a machine without one: a device's memory, FLOPs,\n"
        "communication and the least time a step can take. Exit code 1 if it does not fit.",
        "python -m mars_jax.compile --config configs/qwen2p5_0p5b_mars.yaml --topology v5e:2x4 \\\n"
        "    --architecture configs/architectures/qwen2p5_0p5b.json",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file of a run, as for mars_jax.train")
    parser.add_argument("--topology", required=True, metavar="NAME", help="v5e:4x4, v5p:2x2x2, v6e:16x16, …")
    parser.add_argument("--step", choices=("train", "decode"), default="train", help="which; default: %(default)s")
    parser.add_argument(
        "--slots", type=int, default=8, metavar="N", help="rows of a decoding step; default: %(default)s"
    )
    parser.add_argument(
        "--capacity",
        type=int,
        default=1024,
        metavar="N",
        help="tokens such a row has room for; default: %(default)s",
    )
    parser.add_argument(
        "--architecture",
        metavar="FILE",
        help="a config.json to use in place of that of model.path, which is not opened",
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of text on stdout")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys that replace those of the file")
    return parser


def read_architecture(cfg, file: str | None):
    """The `ModelConfig` of a run without opening its weights. Raises UserError where no config.json is found."""
    from mars_jax.models.families import model_config
    from mars_jax.models.hf_folder import read_json

    if file is not None:
        return model_config(read_json(Path(file)))
    if cfg.model.scratch is not None:
        return cfg.model.scratch.model_config(cfg.model.scratch.vocab_size)
    for place in (Path(cfg.model.path) / "config.json", Path(cfg.model.path) / "hf" / "config.json"):
        if place.is_file():
            return model_config(read_json(place))
    raise UserError(f"model.path={cfg.model.path} holds no config.json here: give one with --architecture FILE")


def describe(compiled, chip, topology: str, mesh) -> str:
    """What a person wants to know, a few lines."""
    memory, best = compiled.memory, compiled.estimate
    parts = {
        "arguments": memory.arguments,
        "outputs not in their place": memory.outputs - memory.aliased,
        "temporaries": memory.temporaries,
        "program": memory.code,
    }
    lines = [
        f"{topology}: {mesh.size} chip(s) as " + " x ".join(f"{name} {size}" for name, size in mesh.shape.items()),
        f"memory of a chip: {memory.total / GIB:.2f} of {chip.hbm_bytes / GIB:.0f} GiB ("
        + ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
        + ")",
        f"matrix products:  {compiled.flops / 1e12:.4g} TFLOP a chip",
        f"memory traffic:   {compiled.counts.bytes / 1e9:.3g} GB a chip",
    ]
    for kind, size in sorted(compiled.counts.collectives.items()):
        lines.append(f"{kind + ':':18}{size / 1e9:.3g} GB in {compiled.counts.collective_calls[kind]:.0f} calls")
    lines += [
        f"least time:       {best.step_seconds * 1e3:.1f} ms, bound by {best.bound} ("
        f"compute {best.compute_seconds * 1e3:.1f}, memory {best.memory_seconds * 1e3:.1f}, "
        f"network {best.network_seconds * 1e3:.1f}); MFU at most {best.mfu:.0%}",
        f"compiled in {compiled.seconds_to_compile:.0f} s",
    ]
    return "\n".join(lines)


def compile_for(topology: str, args: argparse.Namespace, cfg):
    """`(Compiled, mesh)` of the step on a slice."""
    import jax.numpy as jnp

    from mars_jax.parallel.ahead_of_time import MASK_ID, compile_decode_step, compile_train_step
    from mars_jax.parallel.mesh import make_mesh
    from mars_jax.parallel.roofline import chip_of
    from mars_jax.parallel.topology import topology_devices
    from mars_jax.training.setup import run_mesh

    devices, chip = topology_devices(topology), chip_of(topology)
    model = read_architecture(cfg, args.architecture)
    model = dataclasses.replace(model, lora=cfg.lora.lora(MASK_ID))
    if args.step == "train":
        mesh = run_mesh(cfg, devices)
        return compile_train_step(cfg, model, mesh, chip), mesh
    mesh = make_mesh(devices=devices[:1])
    sizes = {"slots": args.slots, "capacity": args.capacity}
    window = cfg.objective.block_size - 1
    return compile_decode_step(model, window, devices[0], chip, dtype=jnp.dtype(cfg.train.dtype), **sizes), mesh


def largest_buffers(args: argparse.Namespace, cfg) -> str:
    """Named by compiling for a larger chip: of a program that does not fit, the compiler says only the sum."""
    from mars_jax.parallel.ahead_of_time import DoesNotFitError
    from mars_jax.parallel.topology import topology_devices

    larger = f"v5p:2x2x{max(1, len(topology_devices(args.topology)) // 4)}"
    log.info("%s is too small; compiling for %s to name the largest buffers", args.topology, larger)
    try:
        compiled, _ = compile_for(larger, args, cfg)
    except DoesNotFitError as error:
        return f"and on {larger}: {error}"
    return f"on {larger} it takes {compiled.memory.total / GIB:.2f} GiB; largest buffers:\n" + "\n".join(
        compiled.largest
    )


def command(args: argparse.Namespace) -> None:
    from mars_jax.parallel import topology

    topology.keep_quiet()  # before anything starts a backend
    from mars_jax.config import load_config
    from mars_jax.parallel.ahead_of_time import DoesNotFitError
    from mars_jax.parallel.roofline import chip_of

    cfg = load_config(args.config, args.overrides)
    chip = chip_of(args.topology)
    try:
        compiled, mesh = compile_for(args.topology, args, cfg)
    except DoesNotFitError as error:
        raise DoesNotFitError(f"{error}\n{largest_buffers(args, cfg)}") from error
    if args.json:
        where = {"topology": args.topology, "mesh": dict(mesh.shape), "hbm_bytes": chip.hbm_bytes}
        print(json.dumps(where | dataclasses.asdict(compiled), indent=2))
    else:
        print(describe(compiled, chip, args.topology, mesh))
    if compiled.memory.total > chip.hbm_bytes:
        needed = f"{compiled.memory.total / GIB:.2f} GiB of a chip's {chip.hbm_bytes / GIB:.0f} are needed"
        raise DoesNotFitError(f"{needed}; largest buffers:\n" + "\n".join(compiled.largest))


if __name__ == "__main__":
    sys.exit(cli.main(build_parser, command))
