// dS of a block of queries against a tile of keys, kept skewed: row i of the block starts at column
// BLOCK_L - 1 - i, so a column is one rho. The margins are zero and stay so.
constexpr int64_t SKEW_LD = BLOCK_S + BLOCK_L;
