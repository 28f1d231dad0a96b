"""Published wheels, fetched once into the doctor's cache. Without one a test is skipped with pip's reason."""

import os
import shutil

import pytest

from dcp_fix.doctor.release import fetch_release
from dcp_fix.doctor.target import TargetError
from dcp_fix.doctor.wheel import unpack as unpack_wheel


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(os.path.dirname(__file__)):
            item.add_marker(pytest.mark.upstream)


@pytest.fixture(scope="session")
def release_wheel():
    """Path of a release's wheel: `release_wheel("0.30.0")`."""
    refused = {}

    def fetch(version):
        if version in refused:  # do not wait for pip's time-out again
            pytest.skip(refused[version])
        try:
            return fetch_release(version)
        except TargetError as error:
            refused[version] = str(error)
            pytest.skip(str(error))

    return fetch


@pytest.fixture(scope="session")
def unpacked(release_wheel, tmp_path_factory):
    """The folder that holds a release's `vllm/`, as far as the probes need it."""
    roots = {}

    def unpack(version):
        if version not in roots:
            roots[version] = tmp_path_factory.mktemp(version)
            unpack_wheel(release_wheel(version), roots[version])
        return roots[version]

    return unpack


@pytest.fixture
def copy_of(unpacked, tmp_path):
    """A copy of a release in which files may be replaced: everything else is a hard link to the original."""

    def copy(version):
        root = tmp_path / "copy"
        shutil.copytree(unpacked(version), root, copy_function=os.link)
        return root

    return copy
