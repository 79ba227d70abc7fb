"""A plan as one HTML page that needs no network: what `autopar report` writes."""
