from __future__ import annotations

import numpy as np
from PIL import Image

from partial_rollout.main_diffusion import GAP, save_grid
from partial_rollout.run.tiny_qwen_image.reward import brightness, redness, warm_left


def picture(red, green, blue):
    return np.full((8, 6, 3), (red, green, blue), dtype=np.uint8)


def test_a_grid_has_every_image_in_its_place(tmp_path):
    images = [picture(index, 0, 0) for index in range(5)]
    save_grid(images, tmp_path / "new" / "grid.png")
    grid = np.asarray(Image.open(tmp_path / "new" / "grid.png"))
    assert grid.shape == (2 * (8 + GAP) - GAP, 3 * (6 + GAP) - GAP, 3)
    assert grid[0, 0].tolist() == [0, 0, 0]
    assert grid[8 + GAP, 6 + GAP].tolist() == [4, 0, 0]
    assert grid[-1, -1].tolist() == [255, 255, 255]


def test_rewards_say_what_they_are_named_for():
    black, white, red = picture(0, 0, 0), picture(255, 255, 255), picture(255, 0, 0)
    assert brightness([black, white], ["", ""]) == [0.0, 1.0]
    assert redness([black, white, red], [""] * 3) == [0.0, 0.0, 1.0]
    split = np.concatenate([red[:, :3], picture(0, 0, 255)[:, :3]], axis=1)
    assert warm_left([split, split[:, ::-1]], ["", ""]) == [2.0, -2.0]
