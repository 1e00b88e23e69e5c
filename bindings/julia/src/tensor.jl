# Arrays with four named axes.

"Where head, sequence and batch stand in an array of a layout; batch is 0 where there is none."
function axes_of(layout::Symbol, n::Int, name::String)
    if n == 4
        layout === :dhsb && return (2, 3, 4)
        layout === :dshb && return (3, 2, 4)
    end
    order = replace(replace(String(layout), 't' => 's'), 'p' => 'b')
    letters = sort(collect(replace(order, 'b' => "")))
    (letters == ['d', 'h', 's'] && count(==('b'), order) <= 1 && order[1] == 'd') ||
        refuse(:LAYOUT, "layout", "layout = :$layout; expected d before an order of h, s, b, such " *
                                  "as :dhsb, :dshb or :dht")
    order = n == 3 ? replace(order, 'b' => "") : 'b' in order ? order : order * "b"
    ndims = length(order)
    n == ndims || refuse(:SIZE, name, "$name has $n dimensions; expected $ndims ($order)")
    at(letter) = something(findfirst(==(letter), order), 0)
    return (at('h'), at('s'), at('b'))
end

"An array, its sizes by name, and the library's view of it."
struct Tensor{A<:AbstractArray}
    array::A
    c::C.flashattn_tensor
    dim::Int
    heads::Int
    rows::Int
    batch::Int
end

Tensor(x::AbstractArray, layout::Symbol, n::Int, name::String) =
    about(() -> named_tensor(x, layout, n, name), name)

function named_tensor(x::AbstractArray, layout::Symbol, n::Int, name::String)
    ndims(x) == n || refuse(:SIZE, name, "$name has size $(size(x)); expected $n dimensions")
    h, s, b = axes_of(layout, n, name)
    device(storage(x))  # or an error that says what is wrong with it
    sizes, step = size(x), steps(x)
    # To the library 0 is a default, which would be read and written past the array.
    sizes[h] > 0 || refuse(:SIZE, name,
        "$name has size $sizes, 0 heads by layout = :$layout; give at least 1")
    sizes[1] > 0 || refuse(:SIZE, name, "$name has size $sizes, heads of 0 elements; give at least 1")
    step[1] == 1 || sizes[1] <= 1 || refuse(:STRIDE, name,
        "$name has stride $(step[1]) in its first dimension; the elements of a head must be " *
        "contiguous: copy it")
    any(step .< 0) && refuse(:STRIDE, name, "$name has a negative stride; copy it")
    # A step that is never taken may be anything, in Julia and for the library.
    stride(d) = d == 0 ? 0 : step[d]
    c = C.flashattn_tensor(data = address(x), stride_batch = stride(b), stride_head = stride(h),
                           stride_seq = stride(s))
    return Tensor(x, c, sizes[1], sizes[h], sizes[s], b == 0 ? 1 : sizes[b])
end

"0 tokens a page are no pages to the library."
check_pages(t::Tensor, name::String) = t.rows > 0 || refuse(:PAGE_SIZE, name,
    "$name has size $(size(t.array)), pages of 0 tokens; give at least 1")

"The size of an array of the same layout with another dim."
like(t::Tensor, dim::Int) = (dim, Base.tail(size(t.array))...)
device(t::Tensor) = device(storage(t.array))

"An array beside the one that says where a call runs: no kernel may get memory of another device."
function check_device(x::AbstractArray, first::Tensor, name::String)
    device(storage(x)) == device(first) ||
        refuse(:NO_DEVICE, name, "$name lies on another device than the call runs on; move it there")
    return x
end

"A size of the library: what does not fit in 32 bits is refused here."
function size32(n::Integer, name::String)
    0 <= n || refuse(:SIZE, name, "$name = $n is below 0; give a size")
    n <= typemax(Int32) ||
        refuse(:SIZE, name, "$name = $n is past the range of Int32; give at most $(typemax(Int32))")
    return Int32(n)
end

function check_size(x::AbstractArray, wanted::Tuple, name::String)
    size(x) == wanted || refuse(:SIZE, name, "$name has size $(size(x)); expected $wanted")
    return x
end
