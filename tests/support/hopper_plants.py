"""Faults for the Hopper kernels: (what, file, what it says, what it is made to say, case, what is
noticed). The last: part of a fault's text, "values" for wrong ones, "" for either."""

from oracle import Case

NARROW = Case("narrow", B=1, H=1, L=150, M=250, D=64, window=180)
WIDE = Case("wide", B=1, H=1, L=70, M=150, D=128, window=80)
LONG = Case("long", B=1, H=1, L=330, M=64, D=64)
NOTHING = Case("nothing", B=1, H=1, L=70, M=10, D=64, intervals="nothing")
MASKED = Case("masked", B=1, H=1, L=64, M=40, D=64)  # rows of the first tile that do not exist
PREPARED = """    unskew_.put(none, 0), unskew_.put(none, 1);
    fence_units();
    meet_group(group_);
"""
PASSED_ON = """    unskew_.put(pairs, t & 1);
    multiply<T, Rows::depth, true>(dq, pairs, stage(S::k, k_.stage()));
    fence_units();
"""
FORWARD = [
    (
        "a wait for scores",
        "forward",
        "await_products<1>();\n      results(values);",
        "results(values);",
        NARROW,
        "before it was waited",
    ),
    (
        "a wait for the values",
        "forward",
        "ask_values(values, weights);\n    await_products<0>();",
        "ask_values(values, weights);",
        NARROW,
        "waited",
    ),
    ("a wait for a tile", "loads", "    await(ready_ + walk_.stage, walk_.parity);\n", "", NARROW, ""),
    ("a wait for an empty stage", "loads", "    await(empty_ + walk_.stage, walk_.parity);\n", "", NARROW, ""),
    ("a wrong parity", "loads", "walk_.parity = 1;", "walk_.parity = 0;", NARROW, "wait for ever"),
    (
        "a wrong number of bytes",
        "loads",
        "arrive_expecting(full, S::BYTES);",
        "arrive_expecting(full, S::BYTES + 16);",
        NARROW,
        "wait for ever",
    ),
    ("too few arrivals", "query_block", "v.make(S::GROUPS * WARPS_A_GROUP)", "v.make(1)", NARROW, ""),
    ("a fence after clearing", "loads", "    fence_units();\n", "", MASKED, "fence.proxy.async"),
    (
        "a meeting in the shift",
        "forward",
        "skew_.put(block, t);\n    meet_warp();",
        "skew_.put(block, t);",
        NARROW,
        "race",
    ),
    ("a meeting before giving back", "loads", "give_back() {\n    meet_warp();", "give_back() {", NARROW, "race"),
    ("a stage too few", "tile", "if (++stage == STAGES)", "if (++stage == STAGES + 1)", NARROW, ""),
    (
        "a tile too few of r",
        "query_block",
        "for (int j = -S::GROUPS; j <= 0; ++j) load_r(j);",
        "for (int j = 1 - S::GROUPS; j <= 0; ++j) load_r(j);",
        NARROW,
        "",
    ),
    (
        "a column too far",
        "skew",
        "const int key = row - 2 * pair - e;",
        "const int key = row - 2 * pair - e + 1;",
        NARROW,
        "",
    ),
    (
        "shared memory that does not begin at 0",
        "skew",
        "memory_ + (to_[e] | (static_cast<uint32_t>(eight_[e] + later + 256 * up) & 0xF00))",
        "(memory_ + to_[e]) | (static_cast<uint32_t>(eight_[e] + later + 256 * up) & 0xF00)",
        NARROW,
        "",
    ),
    ("a block without tiles", "forward", "if (block_.tiles) pass_tiles(", "pass_tiles(", NOTHING, "wait for ever"),
]
BACKWARD = [
    ("a swizzle off by one", "tile", "(at >> 7 & 7)", "(at >> 8 & 7)", WIDE, "values"),
    (
        "a fence before products",
        "backward_queries",
        PREPARED,
        PREPARED.replace("    fence_units();\n", ""),
        NARROW,
        "fence.proxy.async",
    ),
    (
        "a meeting before products",
        "backward_queries",
        PREPARED,
        PREPARED.replace("    meet_group(group_);\n", ""),
        WIDE,
        "fence.proxy.async",
    ),
    (
        "a meeting before distances",
        "backward_queries",
        "    meet_group(group_);  // all have read what this overwrites\n",
        "",
        NARROW,
        "race",
    ),
    (
        "a fence after distances",
        "backward_queries",
        PASSED_ON,
        PASSED_ON.replace("    fence_units();\n", ""),
        NARROW,
        "fence.proxy.async",
    ),
    (
        "registers that a product reads, read",
        "backward_queries",
        PASSED_ON,
        "".join(f"{x}\n" for x in sorted(PASSED_ON.splitlines(), key=lambda x: "put" in x)),
        NARROW,
        "a register is read that an asynchronous product still reads",
    ),
    ("a wait for distances", "backward_queries", "await_products<3>();", "await_products<4>();", NARROW, "waited"),
    (
        "r given back too early",
        "backward_queries",
        "    r_.skip();\n  }\n  // Products",
        "    r_.give_back();\n  }\n  // Products",
        NARROW,
        "",
    ),
    (
        "the wrong block of distances",
        "backward_queries",
        "return static_cast<uint32_t>(t & 1);",
        "return static_cast<uint32_t>(~t & 1);",
        NARROW,
        "values",
    ),
    (
        "r's rows off by one",
        "backward_queries",
        "block.distance(-1 - group_) + warp_",
        "block.distance(-1 - group_) + 1 + warp_",
        NARROW,
        "values",
    ),
    (
        "a meeting of keys and queries",
        "backward_keys",
        "    meet_group(group_);\n    turn_.get",
        "    turn_.get",
        NARROW,
        "race",
    ),
    (
        "a wait for what queries left",
        "backward_keys",
        "    stats_.take();  // dout is clear, too\n",
        "",
        NARROW,
        "race",
    ),
    (
        "a wait for both blocks",
        "backward_keys",
        "    await_products<1>();\n",
        "    await_products<2>();\n",
        NARROW,
        "waited",
    ),
    (
        "queries given back too early",
        "backward_keys",
        "    await_products<0>();\n    results(dv);\n    results(dk);\n    stats_.skip();\n    q_.give_back();",
        "    stats_.skip();\n    q_.give_back();\n    await_products<0>();\n    results(dv);\n    results(dk);",
        LONG,
        "",
    ),
    (
        "shared memory that does not begin at 0, turned",
        "turn",
        "memory_ + ((static_cast<uint32_t>(256 * eight_[e] + 256 * up) & 0x700) | (to_[e] | buffer))",
        "((static_cast<uint32_t>(256 * eight_[e] + 256 * up) & 0x700) | (memory_ + (to_[e] | buffer)))",
        NARROW,
        "",
    ),
    (
        "a block of gradients without tiles",
        "backward_queries",
        "if (block_.tiles) pass_tiles(",
        "pass_tiles(",
        NOTHING,
        "wait for ever",
    ),
    ("one buffer of the turn", "turn", "(step & 1) * BYTES", "(step & 0) * BYTES", NARROW, "race"),
    (
        "a column too far of the turn",
        "turn",
        "const int key = row - 2 * pair - e;",
        "const int key = row - 2 * pair - e + 1;",
        NARROW,
        "",
    ),
]
