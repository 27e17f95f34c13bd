"""Settings of all tests: routes do not depend on what this machine's clock says."""

import os

os.environ["FASTDP_CALIBRATE"] = "0"
