"""Runtime of megabuf_fx: layout, buffers, collectives and the ops that graphs call."""

if __name__ != "megabuf_fx.runtime":
    # Under a second name the custom ops would be registered twice.
    raise ImportError("import megabuf_fx.runtime, not runtime")
