"""FX passes of megabuf_fx: graph in, graph out. They know plans, not tensors."""

if __name__ != "megabuf_fx.passes":
    # Under a second name every pass would exist twice and see another set of plan types.
    raise ImportError("import megabuf_fx.passes, not passes")
