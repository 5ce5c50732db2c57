// The table of one ISA. Included inside its namespace, after the kernels.
// `Narrow` is the kernel of the types that a bfloat16 holds exactly.
template <template <class> class Narrow>
constexpr KernelTable make_table(const char* name) {
    return KernelTable{
        name,
        {Append<StoreF32>::run, Append<StoreF16>::run, Append<StoreBF16>::run, Append<StoreI8>::run,
         Append<StoreI4>::run},
        {AttendItem<PlainKernel<StoreF32>>::run, AttendItem<PlainKernel<StoreF16>>::run,
         AttendItem<Narrow<StoreBF16>>::run, AttendItem<Narrow<StoreI8>>::run, AttendItem<Narrow<StoreI4>>::run},
        merge_partials,
        read_all,
    };
}
