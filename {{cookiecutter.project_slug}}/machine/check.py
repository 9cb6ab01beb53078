"""Versions, devices, precisions and disk of this machine, and whether all processes agree."""

import argparse

import torch

from machine.project import Project
from machine.report import Section
from training import startup
from training.ranks import Ranks

NEEDS_PROJECT = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of check: none."""


def run(
    options: argparse.Namespace, project: Project | None, ranks: Ranks, device: torch.device
) -> Section:
    """What this machine is; all processes must call it."""
    section = Section("check", facts=startup.versions())
    everywhere = ranks.gather(section.facts)
    if any(each != everywhere[0] for each in everywhere):
        section.failures.append("the processes have different versions")
    return section
