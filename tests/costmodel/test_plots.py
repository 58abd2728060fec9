"""Pictures: well-formed, true to the figures, readable, on paper and in the dark."""

from __future__ import annotations

import re
import struct
import sys
import types
import xml.etree.ElementTree as ElementTree
import zlib
from pathlib import Path
from typing import Any

import pytest
from sample_answer import GIB, answer

from costmodel import cli, plots
from costmodel.comparison import compare
from costmodel.errors import CostModelError, MissingExtraError
from costmodel.estimation import estimate

SVG = "{http://www.w3.org/2000/svg}"
LLAMA: dict[str, Any] = {
    "model": "meta-llama/Llama-2-7b-hf",
    "method": "lora",
    "bf16": True,
    "framework": "trl",
    "max_length": 1024,
    "lengths": {"dataset": "math_14k"},
    "num_samples": 15_000,
}


def _texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def _boxes(svg: str) -> list[tuple[str, float, float, float, float]]:
    """(text, left, top, right, bottom) of each text, by the module's own widths."""
    boxes = []
    for element in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        text, x, y = element.text or "", float(element.get("x", "")), float(element.get("y", ""))
        width = plots.text_width(text)
        left = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[element.get("text-anchor", "start")]
        boxes.append((text, left, y - 10, left + width, y + 3))
    return boxes


def _assert_readable(svg: str) -> None:
    boxes = _boxes(svg)
    height = float(ElementTree.fromstring(svg).get("height", ""))
    for index, (text, left, top, right, bottom) in enumerate(boxes):
        assert left >= 0, text
        assert right <= plots.WIDTH, text
        assert bottom <= height, text
        for other, other_left, other_top, other_right, other_bottom in boxes[index + 1 :]:
            apart = left >= other_right or other_left >= right or top >= other_bottom or other_top >= bottom
            assert apart, (text, other)


def test_memory_is_drawn_to_scale() -> None:
    svg = plots.estimate_svg(answer())
    bars = {}
    for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and "GiB" in (title.text or ""):
            bars[(title.text or "").partition(":")[0]] = float(rect.get("width", ""))
    assert bars["weights"] / bars["activations"] == pytest.approx(24 / 6, rel=0.01)
    # 34 GiB on the device, of which 34 GiB minus the parts' sum is reserved and idle
    parts = 24 + 0.5 + 0.5 + 1 + 6 + 1 + 0.5 + 0.5
    assert sum(bars.values()) / bars["weights"] == pytest.approx(max(34, parts) / 24, rel=0.01)


def test_each_phase_is_drawn_to_scale_against_the_card() -> None:
    found = estimate({**LLAMA, "gpu": "A40", "per_device_train_batch_size": 8})
    by_phase = found.memory.device_bytes_by_phase
    assert by_phase is not None
    assert {"loss", "backward", "optimizer"} <= set(by_phase)
    assert max(by_phase.values()) == found.memory.peak_device_bytes == by_phase[found.memory.peak_phase]
    svg = plots.estimate_svg(found)
    _assert_readable(svg)
    bars = {}
    for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        bars[(title.text or "").partition(":")[0] if title is not None else ""] = float(rect.get("width", ""))
    for phase, size in by_phase.items():
        assert bars[phase] / bars["loss"] == pytest.approx(size / by_phase["loss"], rel=0.01)


def test_the_card_and_the_interval_are_there() -> None:
    texts = _texts(plots.estimate_svg(answer()))
    assert "NVIDIA A40: 45.0 GiB" in texts
    assert "bracket: 32.0 GiB to 36.0 GiB, 80 % of runs" in texts
    assert "One step: 2 s, bound by expert loop" in texts
    assert "1.2 s, 60.0 %" in texts


def test_groups_of_no_weight_are_one() -> None:
    groups = {"experts": 1.5, "attention": 0.49, **{f"small_{index}": 0.001 for index in range(5)}}
    texts = _texts(plots.estimate_svg(answer(step={"by_group_seconds": groups})))
    assert "all else" in texts
    assert not [text for text in texts if text.startswith("small")]


def test_an_unknown_time_says_what_is_missing() -> None:
    svg = plots.estimate_svg(answer(step_seconds=None, step=None))
    assert "Time of a step: unknown (give the GPU and the lengths)" in _texts(svg)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"verdict": "does_not_fit", "memory": {"peak_device_bytes": 90 * GIB, "peak_device_bytes_high": 100 * GIB}},
        {"memory": {"capacity_bytes": None}},
        {"job": {"model": "an-organisation/" + "a-very-long-name-of-a-model-" * 5}},
        {"memory": {"peak_device_bytes": GIB, "peak_device_bytes_high": GIB, "peak_device_bytes_low": GIB}},
    ],
    ids=["fits", "does not fit", "no card", "long name", "no interval"],
)
def test_no_text_is_clipped_or_overlaps(changes: dict[str, Any]) -> None:
    _assert_readable(plots.estimate_svg(answer(**changes)))


def test_comparison_names_the_front_and_overlaps_nothing() -> None:
    found = compare(LLAMA, tiers=["on_demand", "spot"])
    svg = plots.comparison_svg(found)
    _assert_readable(svg)
    assert {each.gpu for each in found if each.on_pareto_front} <= set(_texts(svg))
    circles = list(ElementTree.fromstring(svg).iter(f"{SVG}circle"))
    assert len(circles) == len([each for each in found if each.fits])
    assert sum(circle.get("class") == "s1" for circle in circles) == sum(each.on_pareto_front for each in found)


def test_points_lie_where_their_dollars_and_hours_are() -> None:
    found = [each for each in compare(LLAMA, ["A40", "H100 SXM", "L40S"]) if each.fits]
    circles = list(ElementTree.fromstring(plots.comparison_svg(found)).iter(f"{SVG}circle"))
    places = {(circle.find(f"{SVG}title").text or ""): circle for circle in circles}  # type: ignore[union-attr]
    by_x = sorted(places, key=lambda title: float(places[title].get("cx", "")))
    assert by_x[0].startswith("H100 SXM")
    assert by_x[-1].startswith("A40")
    cheapest = max(places, key=lambda title: float(places[title].get("cy", "")))
    assert cheapest.startswith(found[0].gpu)


def test_a_name_without_room_at_its_cheapest_point_stands_at_the_next() -> None:
    points = [plots._Point(300, y, "A100-SXM4-80GB", "", False, False) for y in (350, 200, 100)]  # cheapest first
    around_the_cheapest = plots._Box(0, 320, 800, 380)
    (name,) = plots._labels(points, [around_the_cheapest], plots._Box(0, 0, 800, 500))
    assert re.search(r' y="204\.0".*>A100-SXM4-80GB<', name), name


def test_nothing_to_draw() -> None:
    job = {name: value for name, value in LLAMA.items() if name != "lengths"}
    with pytest.raises(CostModelError, match="nothing to draw"):
        plots.comparison_svg(compare(job, ["A40"]))


def _luminance(colour: str) -> float:
    channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(one: str, other: str) -> float:
    """WCAG 2.1's contrast ratio."""
    bright, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_contrast_in_light_and_dark() -> None:
    style = re.search(r"<style>(.*?)</style>", plots.estimate_svg(answer()), re.DOTALL)
    assert style is not None
    light, _, dark = style[1].partition("@media (prefers-color-scheme:dark)")
    for rules in (light, dark):
        fills = dict(re.findall(r"\.(\w+)\{fill:(#[0-9a-f]{6})", rules))
        for kind in ("ink", "muted", "alarm"):
            assert _contrast(fills[kind], fills["paper"]) >= 4.5  # text
        for kind in (name for name in fills if re.fullmatch(r"s\d", name)):
            assert _contrast(fills[kind], fills["paper"]) >= 3  # shapes
    assert dark


@pytest.mark.parametrize(("upper", "ticks"), [(45, [0, 10, 20, 30, 40]), (0.9, [0, 0.2, 0.4, 0.6, 0.8]), (0, [0])])
def test_ticks(upper: float, ticks: list[float]) -> None:
    assert plots.nice_ticks(upper) == pytest.approx(ticks)


def test_log_ticks() -> None:
    assert plots.log_ticks(0.8, 25) == pytest.approx([1, 2, 5, 10, 20])
    assert plots.log_ticks(0.05, 5000) == pytest.approx([0.1, 1, 10, 100, 1000])


def test_text_is_shortened_to_its_place() -> None:
    assert plots.shortened("abc", 100) == "abc"
    short = plots.shortened("a" * 100, 100)
    assert short.endswith("…")
    assert plots.text_width(short) <= 100


def test_markup_in_names_is_text() -> None:
    svg = plots.estimate_svg(answer(job={"model": "<script>alert(1)</script>&"}))
    assert "<script>" not in svg
    assert _texts(svg)[0].startswith("<script>alert(1)</script>&, qlora")


def test_files(tmp_path: Path) -> None:
    svg = plots.estimate_svg(answer())
    plots.write_picture(str(tmp_path / "a.svg"), svg, title="t")
    assert (tmp_path / "a.svg").read_text() == svg
    plots.write_picture(str(tmp_path / "a.html"), svg, title="a < b")
    page = (tmp_path / "a.html").read_text()
    assert svg in page
    assert "<title>a &lt; b</title>" in page
    assert not re.search(r"(src|href)=", page)  # nothing is fetched
    with pytest.raises(CostModelError, match=r"a picture ends in \.svg, \.html or \.png"):
        plots.write_picture(str(tmp_path / "a.pdf"), svg, title="t")
    with pytest.raises(CostModelError, match=r"cannot write .*a\.svg: there is no folder .*no; make it first"):
        plots.write_picture(str(tmp_path / "no" / "a.svg"), svg, title="t")


def _pixels(png: bytes, num_rows: int) -> tuple[int, int, list[bytes]]:
    """(width, height, the first rows) of an 8-bit PNG without interlacing, its filters undone."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {b"IDAT": b""}, 8
    while at < len(png):
        (size,), kind = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
        chunks[kind] = chunks.get(kind, b"") + png[at + 8 : at + 8 + size]
        at += 12 + size
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, interlaced) == (8, 0)
    step = {2: 3, 6: 4}[colour]
    data, rows, above = zlib.decompress(chunks[b"IDAT"]), [], bytearray(width * step)
    for start in range(0, num_rows * (width * step + 1), width * step + 1):
        kind, row = data[start], bytearray(data[start + 1 : start + 1 + width * step])
        for index in range(len(row)):
            left = row[index - step] if index >= step else 0
            corner = above[index - step] if index >= step else 0
            guess = left + above[index] - corner
            paeth = min((left, above[index], corner), key=lambda each: abs(guess - each))
            row[index] = (row[index] + (0, left, above[index], (left + above[index]) // 2, paeth)[kind]) % 256
        rows.append(bytes(row[i] for i in range(len(row)) if step == 3 or i % 4 != 3))
        above = row
    return width, height, rows


def test_png_is_the_light_picture_twice_as_large(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py", reason="resvg-py (extra plots) is not installed")
    svg = plots.estimate_svg(answer())
    plots.write_picture(str(tmp_path / "a.png"), svg, title="t")
    width, height, rows = _pixels((tmp_path / "a.png").read_bytes(), 270)
    tall = float(ElementTree.fromstring(svg).get("height", ""))
    assert (width, height) == (2 * plots.WIDTH, 2 * tall)
    seen = {rows[y][3 * x : 3 * x + 3] for y in range(0, 270, 3) for x in range(width)}
    colours = {bytes.fromhex(colour) for colour in ("ffffff", "1f5fa8", "b00020")}  # paper, weights, the card's limit
    assert colours <= seen
    assert rows[0][:3] == b"\xff\xff\xff"
    # the weights' bar is as long as in the SVG
    bar = next(rect for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect") if rect.get("class") == "s0")
    y = round(2 * (float(bar.get("y", "")) + 13))
    drawn = sum(rows[y][3 * x : 3 * x + 3] == bytes.fromhex("1f5fa8") for x in range(width))
    assert drawn == pytest.approx(2 * float(bar.get("width", "")), abs=2)


def test_png_without_the_extra_or_without_a_font_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ftcost\[plots\]'"):
        plots.write_picture(str(tmp_path / "a.png"), "<svg/>", title="t")
    blind = types.SimpleNamespace(svg_to_bytes=lambda svg_string, width: b"\x89PNG of rectangles alone")
    monkeypatch.setitem(sys.modules, "resvg_py", blind)
    with pytest.raises(CostModelError, match="this machine has none"):
        plots.write_picture(str(tmp_path / "a.png"), plots.estimate_svg(answer()), title="t")
    assert not (tmp_path / "a.png").exists()
    seeing = types.SimpleNamespace(svg_to_bytes=lambda svg_string, width: b"\x89PNG" + svg_string.encode())
    monkeypatch.setitem(sys.modules, "resvg_py", seeing)
    plots.write_picture(str(tmp_path / "a.png"), plots.estimate_svg(answer()), title="t")
    assert (tmp_path / "a.png").exists()


def test_commands_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["-m", LLAMA["model"], "--method", "lora", "--bf16", "--framework", "trl", "--seq-len", "1024"]
    flags += ["--lengths", "dataset:math_14k", "--samples", "15000"]
    assert cli.run(["estimate", *flags, "-g", "A40", "--plot", str(tmp_path / "e.svg"), "--json"]) == 0
    assert cli.run(["compare", *flags, "--gpus", "A40,L40S", "--plot", str(tmp_path / "c.html")]) == 0
    assert (tmp_path / "e.svg").read_text().startswith("<svg")
    assert (tmp_path / "c.html").read_text().startswith("<!doctype html>")
    capsys.readouterr()
    assert cli.run(["estimate", *flags, "-g", "A40", "--plot", str(tmp_path / "e.gif")]) == 2
    assert capsys.readouterr().out == ""
