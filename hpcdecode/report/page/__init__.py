"""A results file as one HTML page: `markup` escapes, `facts` reads, `scales` and `charts` draw, `write` assembles."""
