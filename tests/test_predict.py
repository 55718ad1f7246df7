"""Forecasts against figures worked out by hand or by exhaustive search elsewhere."""

import json

import pytest

from draftwise.bench.predict import Best, Roofline, best_length, by_depth, expected_tokens, forecasts, speedup, survival
from draftwise.cli import main


@pytest.mark.parametrize(
    ("rate", "tokens", "all_accepted"),
    [(0.9, 4.0951, 0.6561), (0.7, 2.7731, 0.2401), (0.5, 1.9375, 0.0625), (0.3, 1.4251, 0.0081)],
)
def test_four_drafted_tokens(rate, tokens, all_accepted):
    assert expected_tokens([rate] * 4) == pytest.approx(tokens, abs=5e-5)
    assert survival([rate] * 4)[-1] == pytest.approx(all_accepted, abs=5e-5)


COSTS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
BEST = {
    0.9: [(19, 6.37), (13, 4.67), (10, 3.43), (7, 2.37), (5, 1.87), (3, 1.38)],
    0.7: [(8, 2.76), (6, 2.35), (4, 1.98), (3, 1.58), (2, 1.37), (1, 1.13)],
    0.5: [(4, 1.79), (3, 1.63), (2, 1.46), (1, 1.25), (1, 1.15), (0, 1.00)],
    0.3: [(3, 1.34), (2, 1.26), (1, 1.18), (1, 1.08), (0, 1.00), (0, 1.00)],
}


@pytest.mark.parametrize(
    ("rate", "cost", "length", "gain"),
    [(rate, cost, *cell) for rate, row in BEST.items() for cost, cell in zip(COSTS, row, strict=True)],
)
def test_best_length(rate, cost, length, gain):
    best = best_length([rate], cost)
    assert best.length == length
    assert best.speedup == pytest.approx(gain, abs=0.005)


def test_a_mixture_of_easy_and_hard_stretches_beats_its_mean_rate():
    mixed = (expected_tokens([0.95] * 4) + expected_tokens([0.3] * 4)) / 2
    assert mixed == pytest.approx(2.97, abs=0.01)
    assert expected_tokens([0.625] * 4) == pytest.approx(2.41, abs=0.01)


def test_rates_by_depth_multiply_and_the_last_goes_on():
    assert by_depth([0.9, 0.5], 4) == [0.9, 0.5, 0.5, 0.5]
    assert expected_tokens([0.9, 0.5]) == pytest.approx(1 + 0.9 + 0.45)


def test_a_pass_that_grows_with_its_rows_shortens_the_draft():
    assert best_length([0.8], 0.0, longest=16).length == 16
    assert best_length([0.8], 0.0, longest=16, pass_cost=lambda rows: rows) == Best(0, 1.0)
    assert speedup([0.8], 0.0, pass_cost=lambda rows: 1.5 if rows > 1 else 1.0) == pytest.approx(1.8 / 1.5)


def test_no_draft_changes_nothing():
    assert [tuple(row) for row in forecasts([0.7], 0.1, longest=0)] == [(0, 1.0, 1.0, 1.0)]


@pytest.mark.parametrize(("rate", "cost", "what"), [(1.1, 0.1, "acceptance"), (-0.1, 0.1, "acceptance"), (0.5, -1, "cost")])
def test_meaningless_figures_are_refused(rate, cost, what):
    with pytest.raises(ValueError, match=what):
        speedup([rate], cost)


def test_roofline_of_an_h200_with_eight_billion_bf16_weights():
    roofline = Roofline(bandwidth=4.8e12, arithmetic=990e12, parameters=8e9, bits=16)
    assert roofline.break_even == pytest.approx(206, abs=0.5)
    assert roofline.seconds(1) == roofline.seconds(206) == pytest.approx(16e9 / 4.8e12)
    assert roofline.seconds(412) == pytest.approx(2 * 8e9 * 412 / 990e12)
    assert roofline.pass_cost(1) == 1
    assert roofline._replace(bits=4).break_even == pytest.approx(51.6, abs=0.1)


def test_command_shows_the_best_length_and_a_picture(capsys):
    assert main(["predict", "--acceptance", "0.7", "--cost", "0.1"]) == 0
    out = capsys.readouterr().out
    [best] = [line for line in out.splitlines() if "best" in line]
    assert best.split()[:4] == ["4", "2.773", "24.0%", "1.98×"]
    assert "█" in best


def test_command_as_json_with_a_roofline(capsys):
    line = "predict --acceptance 0.9,0.7 --cost 0 --parameters 8B --bits 16 --bandwidth 4800 --arithmetic 990000 --json"
    assert main(line.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["acceptance"] == [0.9, 0.7]
    assert found["roofline"]["break_even_rows"] == pytest.approx(206.25)
    assert found["roofline"]["milliseconds"][0] == pytest.approx(3.333, abs=0.001)
    assert found["lengths"][2]["tokens_per_step"] == pytest.approx(1 + 0.9 + 0.63)


def test_command_says_when_nothing_gains(capsys):
    assert main("predict --acceptance 0.3 --cost 0.5 --length 4".split()) == 0
    out = capsys.readouterr().out
    assert "no draft length gains anything" in out
    assert "yours" in out


def test_command_draws_a_file(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "forecast.png"
    assert main(["predict", "--parameters", "135M", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("argument", ["--acceptance=2", "--acceptance=x", "--cost=-1", "--parameters=many", "--bits=0"])
def test_command_refuses_meaningless_figures_in_one_line(argument, capsys):
    assert main(["predict", argument]) == 2
    err = capsys.readouterr().err
    assert err.startswith("draftwise: error: ") and err.count("\n") == 1
    assert argument.split("=")[0] in err
