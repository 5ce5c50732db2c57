// What the kernels that work in tiles have in common. Included inside the namespace of one ISA, after the tile unit.
//
// `V`: the kernel that attends in vector registers where tiles do not fit. Rows: query rows of one pass. RowTiles: rows
// of a tile that a query row takes.
template <class V, int Rows, int RowTiles>
struct TileKernel : V {
    static constexpr bool kTiles = true;
    static constexpr int kRows = Rows;
    static constexpr int kSums = 0;
    static constexpr int kSoftmaxLines = 3;  // prefetched while a row's weights are made; more wait for a line buffer
    struct Unit : TileUnit {
        template <int MR>
        void shape() {
            configure(RowTiles * MR);
        }
    };
};
