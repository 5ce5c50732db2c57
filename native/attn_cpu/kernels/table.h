// The table of one ISA. Included inside its namespace, after the kernels.
// `Bf16` and `Coded` are the kernels of bfloat16 and of int8 and int4, `Bf16Words` what prompts in bfloat16 are kept
// as.
template <template <class> class Bf16, template <class> class Coded, class Bf16Words>
constexpr KernelTable make_table(const char* name) {
    return KernelTable{
        name,
        {Append<StoreF32>::run, Append<StoreF16>::run, Append<StoreBF16>::run, Append<StoreI8>::run,
         Append<StoreI4>::run},
        {AttendItem<PlainKernel<StoreF32>>::run, AttendItem<PlainKernel<StoreF16>>::run,
         AttendItem<Bf16<StoreBF16>>::run, AttendItem<Coded<StoreI8>>::run, AttendItem<Coded<StoreI4>>::run},
        merge_partials,
        {Prefill<FloatWords>::kernel(), Prefill<Bf16Words>::kernel()},
        read_all,
    };
}
