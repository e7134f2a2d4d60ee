//! A GPU that this process uses: its context, what it is, its kernels, and which other GPUs' memory it reaches.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use pdkv_core::{Error, ErrorKind, Result};

use super::context::Context;
use super::device::Device;
use super::driver::Driver;
use super::facts::{self, MemoryKind, pointer_facts};
use super::find::Sources;
use super::numbers as n;
use super::pages::Kernels;
use super::stream::Stream;
use super::verdict::{judged, lasts};
use crate::kernels::DeviceFacts;

/// How long a failure is believed that may pass.
const AGAIN: Duration = Duration::from_secs(5);

/// A GPU, opened once for the process. Cloning is cheap; the primary context stays as long as the process, as torch's does.
#[derive(Clone)]
pub struct Gpu(Arc<Opened>);

struct Opened {
    context: Context,
    name: String,
    uuid: [u8; 16],
    facts: DeviceFacts,
    isolated: Option<String>,
    stream: Stream,
    kernels: OnceLock<Kernels>,
    /// Why they could not be had, and when that was; locked while they are looked for.
    refused: Mutex<Option<(Error, Instant)>>,
    /// GPUs that were asked for peer access, by their numbers, and why they did not get it.
    peers: Mutex<Vec<(u32, Result<()>)>>,
}

/// With the driver that shows each.
static OPENED: Mutex<Vec<(usize, Gpu)>> = Mutex::new(Vec::new());

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu")
            .field("ordinal", &self.ordinal())
            .field("name", &self.0.name)
            .finish_non_exhaustive()
    }
}

impl Gpu {
    /// The GPU of a number among those that this process may see.
    ///
    /// # Errors
    /// `Unsupported` as [`Driver::open`], `Device` when there is no such GPU or its context cannot be made.
    pub fn open(ordinal: u32) -> Result<Self> {
        Self::open_on(&Driver::open()?, ordinal)
    }

    /// The GPU of a number, as a driver shows it.
    ///
    /// # Errors
    /// As [`Gpu::open`].
    pub fn open_on(driver: &Driver, ordinal: u32) -> Result<Self> {
        static MAKING: Mutex<()> = Mutex::new(());
        driver.usable()?;
        if let Some(gpu) = Self::opened_on(driver, ordinal) {
            return Ok(gpu);
        }
        // It may take seconds: nobody waits for it who only asks what is there.
        let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = Self::opened_on(driver, ordinal) {
            return Ok(gpu);
        }
        let gpu = Self::make(&driver.device(ordinal)?)?;
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        opened.push((driver.identity(), gpu.clone()));
        Ok(gpu)
    }

    fn opened_on(driver: &Driver, ordinal: u32) -> Option<Self> {
        let opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        let known = |(of, gpu): &&(usize, Self)| *of == driver.identity() && gpu.ordinal() == ordinal;
        opened.iter().find(known).map(|(_, gpu)| gpu.clone())
    }

    /// The GPU of a number if somebody in this process has opened it. Waits for nobody.
    ///
    /// # Errors
    /// `Unsupported` as [`Driver::open`].
    pub fn opened(ordinal: u32) -> Result<Option<Self>> {
        let driver = Driver::open()?;
        driver.usable()?;
        Ok(Self::opened_on(&driver, ordinal))
    }

    fn make(device: &Device) -> Result<Self> {
        let context = device.context()?;
        Ok(Self(Arc::new(Opened {
            name: device.name()?,
            uuid: device.uuid()?,
            facts: device.facts()?,
            isolated: device.isolated()?,
            stream: Stream::new(&context)?,
            context,
            kernels: OnceLock::new(),
            refused: Mutex::default(),
            peers: Mutex::default(),
        })))
    }

    /// How many GPUs this process may see.
    ///
    /// # Errors
    /// As [`Gpu::open`].
    pub fn count() -> Result<u32> {
        Driver::open()?.device_count()
    }

    /// The GPU whose memory holds an address; `None` where that is host memory, also such that a driver has pinned, and where the process
    /// uses no driver.
    ///
    /// # Errors
    /// `Unsupported` for managed memory and where the driver cannot be used, `Device` when it fails.
    pub fn holding(address: u64) -> Result<Option<Self>> {
        let ask = |attribute| match facts::raw(address, attribute) {
            Err(n::CUDA_ERROR_INVALID_CONTEXT) => facts::raw_in_a_context(address, attribute),
            answer => answer.map_err(|status| facts::failed(address, status)),
        };
        let known = ask(n::CU_POINTER_ATTRIBUTE_MEMORY_TYPE)?;
        match known.map(|kind| kind as u32) {
            Some(n::CU_MEMORYTYPE_DEVICE | n::CU_MEMORYTYPE_UNIFIED) => {}
            _ => return Ok(None),
        }
        let ordinal = ask(n::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)?;
        let ordinal = ordinal.and_then(|number| u32::try_from(number as c_int).ok());
        let gpu = Self::open(ordinal.unwrap_or(0))?;
        match pointer_facts(gpu.context(), address)?.map(|facts| facts.kind) {
            Some(MemoryKind::Device) if ordinal.is_some() => Ok(Some(gpu)),
            Some(MemoryKind::Host) | None => Ok(None),
            Some(_) => Err(managed(address)),
        }
    }

    /// The number of the GPU of a name that is the same in all processes; `None` where this process may not see it. Opens none, and asks the driver
    /// for the names but once.
    ///
    /// # Errors
    /// `Unsupported` as [`Driver::open`], `Device` when the driver fails.
    pub fn number_of(uuid: [u8; 16]) -> Result<Option<u32>> {
        Self::number_on(&Driver::open()?, uuid)
    }

    /// The same without starting a driver, which may take seconds: `None` where this process has started none.
    ///
    /// # Errors
    /// As [`Gpu::number_of`].
    pub fn number_if_started(uuid: [u8; 16]) -> Result<Option<Option<u32>>> {
        Driver::started()
            .map(|driver| Self::number_on(&driver, uuid))
            .transpose()
    }

    fn number_on(driver: &Driver, uuid: [u8; 16]) -> Result<Option<u32>> {
        /// Of each driver the names of its GPUs, by their numbers.
        static NAMES: Mutex<Vec<(usize, Vec<[u8; 16]>)>> = Mutex::new(Vec::new());
        driver.usable()?;
        let find = |all: &[[u8; 16]]| Ok(all.iter().position(|name| *name == uuid).map(|at| at as u32));
        let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, all)) = names.iter().find(|(of, _)| *of == driver.identity()) {
            return find(all);
        }
        let all = 0..driver.device_count()?;
        let all: Vec<_> = all
            .map(|ordinal| driver.device(ordinal)?.uuid())
            .collect::<Result<_>>()?;
        let found = find(&all);
        names.push((driver.identity(), all));
        found
    }

    /// Its primary context, the one that torch uses.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// Its number among those that this process may see.
    pub fn ordinal(&self) -> u32 {
        self.context().device().ordinal()
    }

    /// Its name, as in `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The name that it has in every process.
    pub fn uuid(&self) -> [u8; 16] {
        self.0.uuid
    }

    /// What a launch needs to know.
    pub fn facts(&self) -> &DeviceFacts {
        &self.0.facts
    }

    /// Why no other device reaches its memory, if none does.
    pub fn isolated(&self) -> Option<&str> {
        self.0.isolated.as_deref()
    }

    /// A stream for copies that somebody waits for.
    pub fn stream(&self) -> &Stream {
        &self.0.stream
    }

    /// The kernels of `cuda/`, found or compiled when they are first asked for, which may take seconds.
    ///
    /// # Errors
    /// `Unsupported` without a compiler, which stays so; `Device` when compiler or driver fail, for some seconds, after which they are looked for anew.
    pub fn kernels(&self) -> Result<&Kernels> {
        self.kernels_by(|| Kernels::find(self.context()))
    }

    /// The same from where the caller says, unless they were asked for before.
    ///
    /// # Errors
    /// As [`Gpu::kernels`].
    pub fn kernels_from(&self, sources: &Sources) -> Result<&Kernels> {
        self.kernels_by(|| sources.load(self.context()))
    }

    fn kernels_by(&self, find: impl FnOnce() -> Result<Kernels>) -> Result<&Kernels> {
        let known = &self.0.kernels;
        if let Some(kernels) = known.get() {
            return Ok(kernels);
        }
        let mut refused = self.0.refused.lock().unwrap_or_else(PoisonError::into_inner);
        // Whoever had the lock before may have found them.
        if let Some(kernels) = known.get() {
            return Ok(kernels);
        }
        if let Some((error, since)) = &*refused
            && (lasts(error) || since.elapsed() < AGAIN)
        {
            return Err(error.clone());
        }
        match find() {
            Ok(found) => Ok(known.get_or_init(|| found)),
            Err(error) => {
                *refused = Some((error.clone(), Instant::now()));
                Err(error)
            }
        }
    }

    /// Whether it is the very one, which costs one look.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Switches access to the memory of another GPU on, for memory of `cudaMalloc` there.
    ///
    /// # Errors
    /// `Unsupported` when it is not to be had, `Device` when a call of the driver failed that may go well another time.
    pub fn reaches(&self, other: &Self) -> Result<()> {
        if self.is(other) {
            return Ok(());
        }
        if self.context().driver().identity() != other.context().driver().identity() {
            return Err(cut_off("the GPUs are of two drivers"));
        }
        if self.ordinal() == other.ordinal() {
            return Ok(());
        }
        let mut peers = self.0.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, known)) = peers.iter().find(|(ordinal, _)| *ordinal == other.ordinal()) {
            return known.clone();
        }
        let found = self.switch_on(other).map_err(judged);
        if found.as_ref().err().is_none_or(lasts) {
            peers.push((other.ordinal(), found.clone()));
        }
        found
    }

    fn switch_on(&self, other: &Self) -> Result<()> {
        if let Some(reason) = self.isolated().or(other.isolated()) {
            return Err(cut_off(reason));
        }
        let (device, peer) = (self.context().device(), other.context().device());
        if !device.can_reach(peer)? {
            return Err(cut_off(&self.no_access(other)));
        }
        let _entered = self.context().enter()?;
        let enable = self.context().functions().cuCtxEnablePeerAccess;
        // SAFETY: a live context that `other` keeps; the flags must be 0.
        match unsafe { enable(other.context().handle(), 0) } {
            0 | n::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            status => self.context().driver().check("cuCtxEnablePeerAccess", status),
        }
    }

    pub(super) fn no_access(&self, other: &Self) -> String {
        format!(
            "GPU `{}` (`{}`) has no peer access to GPU `{}` (`{}`): no NVLink, and PCIe does not carry it here",
            self.ordinal(),
            self.name(),
            other.ordinal(),
            other.name()
        )
    }
}

const LOOK: &str = "look an address up";

fn cut_off(reason: &str) -> Error {
    Error::new(ErrorKind::Unsupported, "reach another GPU", reason)
}

pub(super) fn managed(address: u64) -> Error {
    let message = format!("the memory at `{address:#x}` is managed: the driver moves it between host and GPU");
    Error::new(ErrorKind::Unsupported, LOOK, message).with_hint("allocate it with `cudaMalloc`, as torch does")
}
