"""What public functions take for a path; each makes a `Path` of it at once."""

import os

AnyPath = str | os.PathLike[str]
