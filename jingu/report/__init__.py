"""The report: one self-contained HTML page that shows how a run learned."""
