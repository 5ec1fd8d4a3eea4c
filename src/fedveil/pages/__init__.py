"""HTML pages: markup that escapes by default, charts, and the reports of runs. Reads no files."""
