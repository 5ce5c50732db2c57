"""What a job says of itself."""

import time

import psutil
import pytest

from hpcdecode.report.stages import process_seconds


def test_the_age_of_this_process():
    assert process_seconds() == pytest.approx(time.time() - psutil.Process().create_time(), abs=2.0)
