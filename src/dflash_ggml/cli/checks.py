"""Verdicts of `dflash-doctor`: pure functions from facts to lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..state.memory import MARGIN, MIB, MemoryPlan
from .wording import count

if TYPE_CHECKING:  # no imports of the binding, which may fail to load
    from ..ggml.device import DeviceInfo
    from ..policy.break_even import BreakEven

Verdict = Literal["ok", "note", "bad"]

# instruction sets relevant for speed: names in /proc/cpuinfo, and ggml's
_SETS = {"avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "avx512f": "AVX512"}
_SETS |= {"avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16", "amx_int8": "AMX_INT8"}
_REBUILD = "build it here: make build, or pip install --force-reinstall --no-deps ."
_WITH_CUDA = "build with it: pip install . -C cmake.define.GGML_CUDA=ON"
_HARDLY = 1.2  # tokens per drafted step below which a draft is nearly useless


@dataclass(frozen=True, slots=True)
class Check:
    """One line: subject, verdict, finding, and advice.

    Attributes:
        data: The finding, for JSON.
    """

    topic: str
    verdict: Verdict
    text: str
    advice: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


def build_check(
    version: str, ggml: str, patches: int, backends: Sequence[str], features: Sequence[str]
) -> Check:
    """The binding: versions, patches, backends, and instruction sets of its CPU kernels."""
    data = {"version": version, "ggml": ggml, "patches": patches, "backends": list(backends)}
    data |= {"cuda": "CUDA" in backends, "features": list(features)}
    text = f"dflash-ggml {version}, ggml {ggml} with {patches} patches, backends: {', '.join(backends)}"
    if not patches:
        return Check("build", "bad", text, f"ggml lacks the operations of trees; {_REBUILD}", data)
    return Check("build", "ok", text, data=data)


def no_binding(why: str) -> Check:
    """The binding cannot be loaded, or does not match these Python files."""
    return Check("build", "bad", f"the compiled binding does not load: {why}", _REBUILD)


def cpu_check(features: Sequence[str], cpu_flags: Iterable[str]) -> Check:
    """Whether the kernels use this CPU's instruction sets; `cpu_flags` as in /proc/cpuinfo, empty without that file."""
    text = f"CPU kernels compiled for {', '.join(features) or 'the plainest CPU'}"
    unused = [name for flag, name in _SETS.items() if flag in set(cpu_flags) and name not in features]
    if unused:
        advice = f"a build on this machine, without DFLASH_PORTABLE, is faster: {_REBUILD}"
        return Check("cpu", "note", f"{text}; this CPU also has {', '.join(unused)}", advice)
    return Check("cpu", "ok", text)


def threads_check(n_threads: int, cores: int, load: float) -> Check:
    """Threads compared with available cores and the system's load.

    Args:
        load: Mean number of runnable tasks.
    """
    data = {"n_threads": n_threads, "cores": cores, "load": load}
    text = f"{count(n_threads, 'thread')} on {count(cores, 'core')}, load average {load:.1f}"
    if n_threads > cores:
        advice = f"threads that share a core wait for each other: -t {cores}"
        return Check("threads", "note", text, advice, data)
    if load > cores - n_threads / 2 and n_threads > 1:
        advice = "other programs want these cores: stop them; without -t fewer threads run meanwhile"
        return Check("threads", "note", text, advice, data)
    return Check("threads", "ok", text, data=data)


def device_checks(
    devices: Sequence[DeviceInfo],
    backends: Sequence[str],
    driver: str | None,
    n_gpu_layers: int,
    main_gpu: int,
    sharing: Sequence[str] = (),
) -> list[Check]:
    """A line per device: whether it is used, and why.

    Args:
        backends: Backends of the build.
        driver: Problem of the NVIDIA driver, "" for none, None without a driver.
        sharing: Names of the GPUs that share the layers, empty if one has all.
    """
    found, cuda = [], "CUDA" in backends
    others = [name for name in backends if name not in ("CPU", "CUDA")]
    gpus = [device for device in devices if device.is_gpu]
    chosen = gpus[main_gpu] if n_gpu_layers and main_gpu < len(gpus) else None
    for i, device in enumerate(gpus):
        text = f"{device.name} ({device.description}), {device.memory_free / MIB:.0f} MiB free"
        is_used = device.name in sharing if sharing and n_gpu_layers else device is chosen
        data = {"name": device.name, "used": is_used}
        if is_used and sharing:
            what = (
                "has the layers" if len(sharing) == 1 else f"shares the layers with {len(sharing) - 1} more"
            )
            found.append(Check("device", "ok", f"{text}: used, {what}", data=data))
        elif sharing and n_gpu_layers:
            text = f"{text}: not used, --device names others"
            found.append(Check("device", "note", text, "name it there too", data))
        elif device is chosen:
            found.append(Check("device", "ok", f"{text}: used, -mg {main_gpu}", data=data))
        elif not n_gpu_layers:
            found.append(Check("device", "note", f"{text}: not used, -ngl 0", "leave -ngl away", data))
        else:
            text = f"{text}: not used, one GPU serves an engine and -mg names {main_gpu}"
            how = f"-mg {i} takes this one, -sm layer all"
            found.append(Check("device", "note", text, how, data))
    if not gpus:
        verdict: Verdict = "bad" if n_gpu_layers > 0 else "note"
        if cuda and driver is None:
            text, advice = (
                "no GPU: there is no NVIDIA driver (libcuda.so.1)",
                "install the driver, or stay on the CPU",
            )
            found.append(Check("device", verdict, text, advice))
        elif cuda:
            why = driver or "the driver lists no device"
            advice = "look at nvidia-smi and CUDA_VISIBLE_DEVICES; a container needs the GPU passed in"
            found.append(Check("device", verdict, f"no GPU: {why}", advice))
        elif others:
            text = f"no GPU: the drivers for {', '.join(others)} list no device"
            advice = "look at vulkaninfo, or rocminfo; drivers that compute on the CPU need GGML_VK_VISIBLE_DEVICES=0"
            found.append(Check("device", verdict, text, advice))
        elif driver is not None:
            text = "no GPU used: an NVIDIA driver is here, but this build has no CUDA backend"
            found.append(Check("device", verdict, text, _WITH_CUDA))
        elif n_gpu_layers > 0:
            text = f"-ngl {n_gpu_layers}: this build has no CUDA backend and this machine no NVIDIA driver"
            found.append(Check("device", "bad", text, "leave -ngl away"))
    elif n_gpu_layers and chosen is None:
        text = f"-mg {main_gpu}: there are {len(gpus)} GPUs"
        found.append(Check("device", "bad", text, f"-mg 0..{len(gpus) - 1}"))
    elif driver is not None and not cuda:
        text = f"{gpus[main_gpu].name if chosen else 'the GPU'}: through a backend without the kernels for NVIDIA GPUs"
        found.append(Check("device", "note", text, _WITH_CUDA))
    for device in devices:
        if not device.is_gpu:
            use = "runs the model" if chosen is None else "only feeds the GPU"
            data = {"name": device.name, "used": chosen is None}
            found.append(Check("device", "ok", f"{device.name} ({device.description}): {use}", data=data))
    return found


def composed_check(name: str, lacking: Sequence[str]) -> Check | None:
    """Operations that the backend of device `name` composes; None if there are none."""
    if not lacking:
        return None
    text = f"{name} composes of ggml's operations: {', '.join(lacking)}"
    return Check(
        "kernels", "note", text, "it works, with more and smaller kernels: drafting gains less than on CUDA"
    )


def fp8_check(why: str) -> Check:
    """Whether --prefill-fp8 has an effect.

    Args:
        why: Why it has none, empty if it has.
    """
    if why:
        return Check("prefill", "note", f"--prefill-fp8 has no effect: {why}", "omit the option")
    text = "prompts are prefilled in 8-bit floats: answers are not the model's own"
    return Check("prefill", "note", text, "omit --prefill-fp8 for its own")


def memory_check(plan: MemoryPlan, where: str, is_gpu: bool, layers: int = 0) -> Check:
    """The memory plan compared with free memory. On the CPU weights stay in the file's mapping, and caches grow as they are
    used.

    Args:
        layers: Number of layers whose experts must go to the host for the rest to fit; 0 if that does not help.
    """
    data: dict[str, Any] = {name: getattr(plan, name) for name in ("n_ctx", "free", "total", "parts")}
    data["kept"] = asdict(plan.host_experts) if plan.host_experts else None
    data["embedding_on_host"] = plan.read_there
    if plan.beside:
        names = ("where", "free", "total", "parts")
        data["devices"] = [{name: getattr(one, name) for name in names} for one in plan.devices]
        where = f"{len(plan.devices)} devices"
    if plan.fits:
        return Check("memory", "ok", f"{where}: {plan}", data=data)
    parts = plan.all_parts
    largest = max(parts, key=lambda name: parts[name])
    if is_gpu or any(one.total > one.free for one in plan.devices):
        experts = f"--n-cpu-moe {layers} fits; or " if layers else ""
        advice = f"{experts}the largest part is {largest}: lower -c, --budget or -b, or take a smaller quantisation"
        return Check("memory", "bad", f"{where}: too little for {plan}", advice, data)
    advice = "close other programs, or lower -c"
    return Check("memory", "note", f"{where}: less than {MARGIN // MIB} MiB are left by {plan}", advice, data)


def costs_check(
    points: Sequence[tuple[str, int, float]], context: int, steps: list[BreakEven], device: str
) -> Check:
    """Pass costs, as (kind, columns, milliseconds) at `context` tokens, and where drafting begins to pay."""
    if not points:
        return Check("costs", "note", "no pass has been measured", "leave --no-calibrate away")
    wide = ("verify", "draft")
    shown = ", ".join(f"{kind} {f'{width} ' if kind in wide else ''}{ms:.2f}" for kind, width, ms in points)
    data = {
        "context": context,
        "ms": [{"kind": kind, "width": width, "ms": ms} for kind, width, ms in points],
        "steps": [asdict(step) for step in steps],
    }
    from ..policy.break_even import where_it_pays

    pays = where_it_pays(steps)
    text = (f"{pays}; " if pays else "") + f"ms per pass behind {context} tokens: {shown}"
    if steps and not any(step.can_pay for step in steps):
        advice = f"nothing to fix: this target is too small for a draft on {device}"
        return Check("costs", "note", text, advice, data)
    return Check("costs", "ok", text, data=data)


@dataclass(frozen=True, slots=True)
class Speed:
    """Results of a short decoding test.

    Attributes:
        drafted: Steps that drafted.
        drafted_tokens: Tokens that those emitted.
    """

    tokens: int
    seconds: float
    drafted: int = 0
    drafted_tokens: int = 0

    @property
    def per_second(self) -> float:
        """Tokens per second; 0.0 when nothing was timed."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance(self) -> float | None:
        """Tokens per drafted step; None when nothing was drafted."""
        return self.drafted_tokens / self.drafted if self.drafted else None


def speed_checks(plain: Speed, auto: Speed | None) -> list[Check]:
    """Speed of plain decoding, and `auto` compared with it; None without a draft."""
    if not plain.tokens or (auto is not None and not auto.tokens):
        text = "the context ends before anything can be timed"
        return [Check("decoding", "note", text, "-c 512 or more, to see how fast decoding is")]
    data: dict[str, Any] = {"mode": "plain", "tokens_per_second": plain.per_second}
    found = [Check("decoding", "ok", f"plain: {plain.per_second:.1f} tokens/s", data=data)]
    if auto is None:
        return found
    length, ratio = auto.acceptance, auto.per_second / plain.per_second if plain.per_second else 0.0
    drafts = f"{length or 0:.2f} tokens per drafted step ({auto.drafted} steps)"
    drafts = "nothing drafted" if length is None else drafts
    text = f"auto: {auto.per_second:.1f} tokens/s, {ratio:.2f} times plain; {drafts}"
    data = {"mode": "auto", "tokens_per_second": auto.per_second, "acceptance_length": length}
    if length is not None and length < _HARDLY and auto.drafted >= 8:
        advice = "take the one made for this very model, not for another of its size"
        found.append(Check("decoding", "note", text, f"the draft hardly ever hits: {advice}", data))
    elif ratio < 0.9:
        advice = "--mode plain, or compare with dflash-run --versus-plain"
        found.append(
            Check("decoding", "note", text, f"drafting loses on this text and machine: {advice}", data)
        )
    else:
        found.append(Check("decoding", "ok", text, data=data))
    return found


def failed(topic: str, error: BaseException, advice: str) -> Check:
    """A failed check; the package's errors include advice."""
    text = " ".join(str(error).split()) or type(error).__name__
    return Check(topic, "bad", text, advice)
