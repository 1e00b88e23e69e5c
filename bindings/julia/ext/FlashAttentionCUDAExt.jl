# CuArrays in place of Arrays. Work is enqueued on the stream of the calling task, as CUDA.jl's own
# work is; arrays that are freed afterwards are freed in that stream's order.
module FlashAttentionCUDAExt

using CUDA: CUDA, CuArray
using FlashAttention: FlashAttention, LibFlashAttn

FlashAttention.device(x::CuArray) =
    (LibFlashAttn.FLASHATTN_DEVICE_CUDA, Int(CUDA.deviceid(CUDA.device(x))))

FlashAttention.address(x::CuArray) = Ptr{Cvoid}(UInt(pointer(x)))

function FlashAttention.stream(x::CuArray)
    # A task may have moved to a thread on which its context is not current yet.
    CUDA.activate(CUDA.context())
    return Ptr{Cvoid}(CUDA.stream().handle)
end

FlashAttention.int32(x::CuArray{Int32}) = x

# In the order of the task's stream, on which the work was enqueued.
FlashAttention.release(x::CuArray) = CUDA.unsafe_free!(x)

end
