//! Code on a device: an image loaded, kernels found in it, and launched.

use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;

use pdkv_core::{Error, ErrorKind, Result};

use super::abi::{CuFunction, CuModule};
use super::context::Context;
use super::numbers::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
use super::stream::Stream;
use crate::kernels::Launch;

/// Shared memory that any kernel may ask for without saying so first.
const FREE_SHARED_BYTES: u32 = 48 << 10;
/// No image is smaller: the header of an ELF file, or the first lines of PTX.
const LEAST_BYTES: usize = 16;

/// A loaded image; unloaded with its last kernel.
#[derive(Clone, Debug)]
pub struct Module(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    context: Context,
    module: CuModule,
}

// SAFETY: the driver takes its own locks; modules may be used from any thread.
unsafe impl Send for Loaded {}
// SAFETY: as for `Send`.
unsafe impl Sync for Loaded {}

/// A kernel; keeps its module.
#[derive(Clone, Debug)]
pub struct Function {
    module: Module,
    function: CuFunction,
}

// SAFETY: as for `Loaded`, which it keeps.
unsafe impl Send for Function {}
// SAFETY: as for `Loaded`, which it keeps.
unsafe impl Sync for Function {}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Blocks.
    pub grid: u32,
    /// Threads of a block.
    pub block: u32,
    /// Shared memory of a block.
    pub shared_bytes: u32,
}

impl Extent {
    /// That of a launch of the kernels.
    pub(super) fn of(launch: &Launch) -> Self {
        Self {
            grid: launch.grid,
            block: launch.block,
            shared_bytes: launch.shared_bytes,
        }
    }
}

impl Module {
    /// Loads an image as a compiler made it.
    ///
    /// # Errors
    /// `Device` when the driver does not take it: damaged, of another architecture, or of a newer CUDA.
    ///
    /// # Safety
    /// The image must be whole. The driver reads as far as the image says it goes.
    pub unsafe fn load(context: &Context, image: &[u8]) -> Result<Self> {
        let text = !image.starts_with(b"\x7fELF");
        if image.len() < LEAST_BYTES || (text && image.last() != Some(&0)) {
            return Err(Error::new(
                ErrorKind::Device,
                "load kernels",
                "the image is neither a cubin nor PTX",
            ));
        }
        let _entered = context.enter()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: a pointer of ours to write to, and an image that is whole, as the caller promises; PTX ends in a zero byte.
        let status = unsafe { (context.functions().cuModuleLoadData)(&raw mut module, image.as_ptr().cast()) };
        context.driver().check("cuModuleLoadData", status)?;
        Ok(Self(Arc::new(Loaded {
            context: context.clone(),
            module,
        })))
    }

    /// A kernel by its name, which may use up to `shared_bytes` of dynamic shared memory.
    ///
    /// # Errors
    /// `Device` when there is no such kernel, or the device has less shared memory.
    pub fn function(&self, name: &str, shared_bytes: u32) -> Result<Function> {
        let context = &self.0.context;
        let text = CString::new(name).unwrap_or_default();
        let _entered = context.enter()?;
        let mut function = std::ptr::null_mut();
        // SAFETY: a pointer of ours to write to, a live module and a C string.
        let status =
            unsafe { (context.functions().cuModuleGetFunction)(&raw mut function, self.0.module, text.as_ptr()) };
        let named = |error: Error| error.with("kernel", name);
        context.driver().check("cuModuleGetFunction", status).map_err(named)?;
        if shared_bytes > FREE_SHARED_BYTES {
            let attribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bytes = c_int::try_from(shared_bytes).unwrap_or(c_int::MAX);
            // SAFETY: a function that the driver just gave.
            let status = unsafe { (context.functions().cuFuncSetAttribute)(function, attribute, bytes) };
            context.driver().check("cuFuncSetAttribute", status).map_err(named)?;
        }
        Ok(Function {
            module: self.clone(),
            function,
        })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        if let Some(_entered) = self.context.enter_to_drop() {
            // SAFETY: loaded by us and unloaded once, when no function of it is left.
            unsafe { (self.context.functions().cuModuleUnload)(self.module) };
        }
    }
}

impl Function {
    /// Launches the kernel with one argument, a struct of these bytes, in the order of the stream. Does not wait.
    ///
    /// # Errors
    /// `Device` when the driver refuses the launch. What fails later shows at the next call that waits.
    ///
    /// # Safety
    /// The argument must be what the kernel takes, and all that it points to must be live, and not be used in a conflicting way,
    /// until the stream has passed this launch.
    pub unsafe fn launch(&self, stream: &Stream, extent: Extent, argument: &[u8]) -> Result<()> {
        let context = &self.module.0.context;
        // The driver copies the argument as the type that the kernel declares: 8 bytes aligned.
        let mut aligned = vec![0_u64; argument.len().div_ceil(8)];
        for (word, bytes) in aligned.iter_mut().zip(argument.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        }
        let _entered = context.enter()?;
        // SAFETY: the context is entered; the rest is as the caller promises.
        unsafe { self.launch_entered(stream, extent, aligned.as_mut_ptr().cast()) }
    }

    /// The same for who has entered the context, with the argument where it lies. Allocates nothing.
    ///
    /// # Errors
    /// As [`Function::launch`].
    ///
    /// # Safety
    /// As for [`Function::launch`]; the context must be entered, and the argument be as large and aligned as the kernel declares it.
    pub(super) unsafe fn launch_entered(&self, stream: &Stream, extent: Extent, argument: *mut c_void) -> Result<()> {
        let context = &self.module.0.context;
        let mut arguments = [argument];
        let none = std::ptr::null_mut();
        let Extent {
            grid,
            block,
            shared_bytes,
        } = extent;
        let launch = context.functions().cuLaunchKernel;
        // SAFETY: live handles; one argument, which the driver copies before it returns, and which is right as the caller promises.
        let status = unsafe {
            launch(
                self.function,
                grid,
                1,
                1,
                block,
                1,
                1,
                shared_bytes,
                stream.handle(),
                arguments.as_mut_ptr(),
                none,
            )
        };
        context
            .driver()
            .check("cuLaunchKernel", status)
            .map_err(|error| error.with("extent", format!("{extent:?}")))
    }
}
