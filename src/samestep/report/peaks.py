"""What GPUs can do at most, by their vendors' data sheets: dense matrix products."""

import torch

_FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8")
# A part of the device's name: TFLOP/s in the _FORMATS. The first that fits counts.
PEAKS = {
    "GB300": (80, 1250, 2500, 2500, 5000),
    "B300": (75, 1100, 2250, 2250, 4500),
    "GB200": (80, 1250, 2500, 2500, 5000),
    "B200": (75, 1100, 2250, 2250, 4500),
    "H200 NVL": (60, 418, 835, 835, 1671),
    "H200": (67, 495, 989, 989, 1979),
    "H100 NVL": (60, 417, 835, 835, 1671),
    "H100 PCIe": (51, 378, 756, 756, 1513),
    "H100": (67, 495, 989, 989, 1979),
    "A100": (19.5, 156, 312, 312, None),
    "L40S": (91.6, 183, 362, 362, 733),
    "L40": (90.5, 90.5, 181, 181, 362),
    "NVIDIA L4": (30.3, 60, 121, 121, 242),
    "RTX PRO 6000 Blackwell Workstation": (126, 252, 504, 504, 1008),
    "RTX PRO 6000 Blackwell Max-Q": (110, None, 439, 439, None),
    "RTX PRO 6000 Blackwell Server": (120, None, 500, 500, 1000),
    "RTX 6000 Ada": (91.1, 182, 364, 364, 728),
    "RTX A6000": (38.7, 77.4, 155, 155, None),
    # For fp8 the data sheet of RTX 50xx has two figures, by how sums are kept.
    "RTX 5090": (105, 105, 210, 210, None),
    "RTX 5080": (56, 56, 113, 113, None),
    "RTX 5070 Ti": (44, 44, 88, 88, None),
    "RTX 5070": (31, 31, 62, 62, None),
    "RTX 4090": (82.6, 82.6, 165, 165, 330),
    "RTX 3090 Ti": (40, 40, 80, 80, None),
    "RTX 3090": (35.6, 35.6, 71, 71, None),
    "V100-SXM": (15.7, None, None, 125, None),
    "V100-PCIE": (14, None, None, 112, None),
    "Tesla T4": (8.1, None, None, 65, None),
    "MI300X": (163, 654, 1307, 1307, 2615),
}
# Other cards of the same names, and parts of a card.
UNKNOWN = ("Laptop", "4090 D", "5090 D", "SUPER", "MIG")


def peaks_of(device: torch.device) -> dict[str, float]:
    """TFLOP/s for each of _FORMATS that the device computes; {} if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for part, numbers in PEAKS.items():
        if part in name and not any(word in name for word in UNKNOWN):
            named = zip(_FORMATS, numbers, strict=True)
            return {format: number for format, number in named if number}
    return {}
