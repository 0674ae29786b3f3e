"""Sets a variable when it is imported, as verl's platform does."""

import os

os.environ["SET_BY_AN_IMPORT"] = "yes"
