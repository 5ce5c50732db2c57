// The table of one ISA. Included inside its namespace, after the kernels.
template <class BF16Kernel>
constexpr KernelTable make_table(const char* name) {
    return KernelTable{
        name,
        {Append<StoreF32>::run, Append<StoreF16>::run, Append<StoreBF16>::run, Append<StoreI8>::run,
         Append<StoreI4>::run},
        {AttendItem<PlainKernel<StoreF32>>::run, AttendItem<PlainKernel<StoreF16>>::run, AttendItem<BF16Kernel>::run,
         AttendItem<PlainKernel<StoreI8>>::run, AttendItem<PlainKernel<StoreI4>>::run},
        merge_partials,
        read_all,
    };
}
