"""What Whisper's encoder reads of a sound: how loud each of some bands is in each hundredth of a second."""

import math

import numpy as np
from numpy.typing import NDArray

from octavo.pictures.support import RATE

WINDOW, HOP = 400, 160  # samples
RANGE = 8.0  # what is quieter than the loudest by so many powers of ten is raised to that
LINEAR_HZ, LINEAR_MEL = 1000.0, 15.0  # up to here Slaney's mel scale is linear
STEP = math.log(6.4) / 27.0  # of a mel above that, in logarithms of frequencies


def log_mel(samples: NDArray[np.float32], num_samples: int, num_bands: int) -> NDArray[np.float32]:
    """[num_bands, num_samples / HOP] of samples of 16 kHz, behind which there is silence up to `num_samples`.

    It is what Transformers' WhisperFeatureExtractor makes, but for rounding: everything here is computed in float64.
    """
    padded = np.zeros(num_samples)
    padded[: len(samples)] = samples
    framed = np.lib.stride_tricks.sliding_window_view(np.pad(padded, WINDOW // 2, mode="reflect"), WINDOW)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    power = np.abs(np.fft.rfft(framed[:num_samples:HOP] * hann)) ** 2
    logs = np.log10(np.maximum(power @ mel_bands(num_bands), 1e-10))
    scaled: NDArray[np.float64] = (np.maximum(logs, logs.max() - RANGE) + 4.0) / 4.0
    return scaled.T.astype(np.float32)


def mel_bands(num_bands: int) -> NDArray[np.float64]:
    """[frequencies, num_bands]: triangles as wide as Slaney's mel scale has them, each of the same area."""
    edges = _hertz(np.linspace(0.0, _mel(RATE / 2), num_bands + 2))
    low, peak, high = edges[:-2], edges[1:-1], edges[2:]
    frequencies = np.linspace(0.0, RATE / 2, WINDOW // 2 + 1)[:, None]
    rising, falling = (frequencies - low) / (peak - low), (high - frequencies) / (high - peak)
    bands: NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling)) * 2.0 / (high - low)
    return bands


def _mel(hertz: float) -> float:
    return LINEAR_MEL + math.log(hertz / LINEAR_HZ) / STEP  # of a frequency above LINEAR_HZ


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    linear = mels * LINEAR_HZ / LINEAR_MEL
    return np.where(mels < LINEAR_MEL, linear, LINEAR_HZ * np.exp((mels - LINEAR_MEL) * STEP))
