"""The HTML report about a run: gathers its data, draws the charts and writes the page."""
