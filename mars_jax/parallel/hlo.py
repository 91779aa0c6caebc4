"""What a compiled program does, counted from its optimized HLO text with loops multiplied out.

XLA's own `cost_analysis` counts the body of a loop once, so a model scanned over its layers looks like a single layer.
Here every computation is weighted by how often it runs. Loops whose length depends on data, and conditionals, need
to be told: see `count`.
"""

import math
import re
from dataclasses import dataclass, field

from mars_jax.parallel.hlo_text import (
    Instruction,
    array_texts,
    arrays,
    called,
    hbm_bytes,
    integers,
    parse,
    root_of,
    shape_bytes,
)

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
# Instructions that move nothing: aliases, or callers whose callees are counted.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"}
SLICING = ("slice", "dynamic-slice", "gather")  # touch a part of their first operand


@dataclass
class Counts:
    """Totals of one execution on one device.

    flops:       of matrix products, two a multiply-add. bytes: read and written by every instruction (fusions once).
    collectives: kind -> bytes that enter or leave a device, of the larger side. collective_calls: kind -> executions.
    kernels:     name -> executions of custom kernels, whose insides are not counted.
    """

    flops: float = 0.0
    bytes: float = 0.0
    collectives: dict[str, float] = field(default_factory=dict)
    collective_calls: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, float] = field(default_factory=dict)


def _dot_flops(dot: Instruction, scope: dict[str, Instruction]) -> float:
    [(_, out)], [(_, left)] = arrays(dot.shape), arrays(scope[dot.operands[0]].shape)
    contracted = math.prod(left[i] for i in integers(dot.attributes, "lhs_contracting_dims"))
    return 2.0 * math.prod(out) * contracted


def _convolution_flops(conv: Instruction, scope: dict[str, Instruction]) -> float:
    """XLA writes matrix products on TPU as convolutions, with padded windows for batch axes: padding is not counted."""
    inputs, kernel, outputs = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", conv.attributes).groups()
    sizes = [arrays(s)[0][1] for s in (scope[conv.operands[0]].shape, scope[conv.operands[1]].shape, conv.shape)]
    [lhs, rhs, out] = [
        dict(zip(labels, dims, strict=True)) for labels, dims in zip((inputs, kernel, outputs), sizes, strict=True)
    ]
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", (re.search(r"window=\{([^}]*)\}", conv.attributes) or [""])[0]))
    total = 2.0 * out["b"] * out["f"] * rhs["i"]
    for i, axis in enumerate(sorted(set(out) - {"b", "f"})):

        def of(name, default, i=i):
            return [int(n) for n in window[name].split("x")[i].split("_")] if name in window else default

        (stride,), (low, _), (spread,), (holes,) = (
            of("stride", [1]),
            of("pad", [0, 0]),
            of("lhs_dilate", [1]),
            of("rhs_dilate", [1]),
        )
        extent = (lhs[axis] - 1) * spread + 1
        places = (o * stride - low + k * holes for o in range(out[axis]) for k in range(rhs[axis]))
        total *= sum(0 <= place < extent and place % spread == 0 for place in places)
    groups = re.search(r"batch_group_count=(\d+)", conv.attributes)
    return total / (int(groups[1]) if groups else 1)


def _trip_count(loop: Instruction, computations) -> int | None:
    """Iterations of a loop that counts up from 0 to a fixed bound; None where the bound depends on data."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition = computations[called(loop, "condition")[0]]
    body = computations[called(loop, "body")[0]]
    root = root_of(condition)
    counter, bound = (condition.get(name) for name in [*root.operands, None, None][:2])
    if "direction=LT" not in root.attributes or counter is None or bound is None or bound.opcode != "constant":
        return None
    index = int(re.search(r"index=(\d+)", counter.attributes)[1])
    stepped = body[root_of(body).operands[index]]  # an unrolled loop counts up by more than one
    steps = [body[name].arguments for name in stepped.operands if body[name].opcode == "constant"]
    return -(-int(bound.arguments) // int(steps[0] if stepped.opcode == "add" and steps else 1))


def _slices(name: str, scope: dict[str, Instruction]) -> list[Instruction] | None:
    """The slices and in-place updates that are all that is done to a value; None where it is used otherwise."""
    found = []
    for user in scope.values():
        if name not in user.operands:
            continue
        if user.opcode == "bitcast":
            inner = _slices(user.name, scope)
            if inner is None:
                return None
            found += inner
        elif user.opcode in (*SLICING, "dynamic-update-slice") and user.operands[0] == name:
            found.append(user)
        else:
            return None
    return found


def _fusion_bytes(fusion: Instruction, scope, body: dict[str, Instruction]) -> int:
    """Operands and results of a fusion; of an array only sliced or updated in place, the part that is touched."""
    total = 0
    parameters = {int(i.arguments): i for i in body.values() if i.opcode == "parameter"}
    for number, operand in enumerate(fusion.operands):
        slices = _slices(parameters[number].name, body)
        if slices is None:
            total += hbm_bytes(scope[operand].shape)
        else:
            total += sum(hbm_bytes(i.shape) for i in slices if i.opcode in SLICING)
    root = root_of(body)
    results = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    for result in results:
        while result.opcode == "bitcast" and result.operands[0] in body:
            result = body[result.operands[0]]
        updated = result.opcode == "dynamic-update-slice"
        total += hbm_bytes(body[result.operands[1]].shape if updated else result.shape)
    return total


def _instruction_bytes(instruction: Instruction, scope, computations) -> int:
    if instruction.opcode == "fusion":
        return _fusion_bytes(instruction, scope, computations[called(instruction, "calls")[0]])
    if instruction.opcode in SLICING:
        return 2 * hbm_bytes(instruction.shape)
    if instruction.opcode == "slice-start":  # of a fetch to on-chip memory: (operands), result, bookkeeping
        fetched = array_texts(instruction.shape)[len(instruction.operands)]
        return shape_bytes(fetched)
    if instruction.opcode.endswith("-start"):  # the result repeats the operands
        return hbm_bytes(instruction.shape)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * hbm_bytes(scope[instruction.operands[1]].shape)
    return hbm_bytes(instruction.shape) + sum(hbm_bytes(scope[name].shape) for name in instruction.operands)


def _collective_kind(opcode: str) -> str | None:
    """The kind of a collective, or None; of an asynchronous pair only the start counts."""
    base = opcode.removesuffix("-start")
    return base if base in COLLECTIVES else None


def _collective_bytes(instruction: Instruction, scope) -> int:
    operands = sum(shape_bytes(scope[name].shape) for name in instruction.operands)
    results = shape_bytes(instruction.shape)
    if instruction.opcode.endswith("-start") and instruction.shape.startswith("("):
        results -= operands  # the result of a start repeats its operands
    return max(operands, results)


def _add(totals: dict[str, float], name: str, value: float) -> None:
    totals[name] = totals.get(name, 0.0) + value


def count(text: str, *, unknown_trips: float = 1.0, taken: float = 1.0) -> Counts:
    """Totals of one execution of the module on one device.

    unknown_trips: iterations of every loop whose length depends on data.
    taken:         share of its executions in which a conditional takes its costliest branch; the others cost nothing.
    """
    computations, entry = parse(text)
    total = Counts()
    counted = set()  # TPU writes an asynchronous collective thrice: where it starts, where it overlaps, where it ends

    def walk(name: str, times: float, fused_into: str | None) -> None:
        scope = computations[name]
        for i in scope.values():
            if i.opcode == "dot":
                total.flops += times * _dot_flops(i, scope)
            elif i.opcode == "convolution":
                total.flops += times * _convolution_flops(i, scope)
            elif i.opcode == "custom-call" and (target := re.search(r'custom_call_target="(\w+)"', i.attributes)):
                _add(total.kernels, target[1], times)
            elif kind := _collective_kind(i.opcode):
                channel = re.search(r"channel_id=(\d+)", i.attributes)
                key = (fused_into or name, channel[1] if channel else i.name)
                if key not in counted:
                    counted.add(key)
                    _add(total.collectives, kind, times * _collective_bytes(i, scope))
                    _add(total.collective_calls, kind, times)
            if not fused_into and i.opcode not in FREE and not i.opcode.endswith("-done"):
                total.bytes += times * _instruction_bytes(i, scope, computations)
            if i.opcode == "while":
                trips = _trip_count(i, computations)
                walk(called(i, "body")[0], times * (unknown_trips if trips is None else trips), fused_into)
            elif i.opcode == "conditional":
                branches = called(i, "branch_computations") or [
                    *called(i, "true_computation"),
                    *called(i, "false_computation"),
                ]
                walk(max(branches, key=lambda b: len(computations[b])), times * taken, fused_into)
            elif i.opcode in ("call", "async-start"):
                for callee in called(i, "to_apply") or called(i, "calls"):
                    walk(callee, times, fused_into)
            elif i.opcode == "fusion":
                walk(called(i, "calls")[0], times, fused_into or name)

    walk(entry, 1.0, None)
    return total


def largest_buffers(text: str, most: int = 8) -> list[str]:
    """The largest arrays that a program holds at some time, each with the operation of the source that makes it."""
    computations, _ = parse(text)
    fused = {name for scope in computations.values() for i in scope.values() for name in called(i, "calls")}
    sizes: dict[str, int] = {}
    for name, scope in computations.items():
        for i in scope.values() if name not in fused else ():
            if i.opcode in FREE - {"parameter"} or i.shape.startswith("("):
                continue
            source = re.search(r'op_name="([^"]*)"', i.attributes)
            sizes[f"{i.shape.split('{')[0]} {source[1] if source else i.opcode}"] = hbm_bytes(i.shape)
    first = sorted(sizes, key=sizes.get, reverse=True)[:most]
    return [f"{sizes[entry] / 2**30:.2f} GiB {entry}" for entry in first]
