//! The kernels of `cuda/` on a device: what a plan needs there, and its launches.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use pdkv_core::{Error, ErrorKind, Result};

use super::context::Context;
use super::find::Origin;
use super::host_paths::HostPaths;
use super::memory::DeviceBuffer;
use super::module::{Extent, Function, Module};
use super::stream::Stream;
use crate::kernels::{self, DeviceFacts, Entry, Job, Lane, Launch, PageTables, View, Wishes};

/// The kernels, loaded on one device. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Kernels(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    context: Context,
    origin: Origin,
    facts: DeviceFacts,
    functions: HashMap<Entry, Function>,
    host_paths: OnceLock<HostPaths>,
}

/// A copy of pages whose tables lie on the device; launched as often as wanted, one launch at a time.
#[derive(Debug)]
pub struct Prepared {
    tables: DeviceBuffer,
    /// Checksums, then the counter of blocks that have arrived.
    state: DeviceBuffer,
    num_pages: usize,
    sums: bool,
    launches: Vec<(Function, Extent, View)>,
}

impl Kernels {
    /// Loads an image of the kernels.
    ///
    /// # Errors
    /// `Device` when the driver does not take it, or a kernel is missing: it is of another release.
    ///
    /// # Safety
    /// The image must be whole, and made from [`kernels::SOURCE`] of this release.
    pub unsafe fn load(context: &Context, image: &[u8]) -> Result<Self> {
        // SAFETY: as the caller promises.
        unsafe { Self::load_from(context, image, Origin::Given) }
    }

    /// The same for an image whose origin is known.
    ///
    /// # Errors
    /// As [`Kernels::load`].
    ///
    /// # Safety
    /// As for [`Kernels::load`].
    pub(super) unsafe fn load_from(context: &Context, image: &[u8], origin: Origin) -> Result<Self> {
        let facts = context.device().facts()?;
        // SAFETY: whole, as the caller promises.
        let module = unsafe { Module::load(context, image) }?;
        let mut functions = HashMap::new();
        for entry in Entry::all(facts.capability.0) {
            let shared_bytes = match entry {
                Entry::Bulk { .. } => entry.most_shared_bytes(&facts),
                _ => 0,
            };
            functions.insert(entry, module.function(&entry.name(), shared_bytes)?);
        }
        Ok(Self(Arc::new(Loaded {
            context: context.clone(),
            origin,
            facts,
            functions,
            host_paths: OnceLock::new(),
        })))
    }

    /// The context that they are loaded in.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// The same kernels, for who knows more of their image. The value must have no clones yet.
    pub(super) fn with_origin(mut self, origin: Origin) -> Self {
        if let Some(loaded) = Arc::get_mut(&mut self.0) {
            loaded.origin = origin;
        }
        self
    }

    /// Where their image came from.
    pub fn origin(&self) -> &Origin {
        &self.0.origin
    }

    /// The device.
    pub fn facts(&self) -> &DeviceFacts {
        &self.0.facts
    }

    /// What was measured between the host and this device.
    pub(super) fn host_paths(&self) -> &OnceLock<HostPaths> {
        &self.0.host_paths
    }

    /// The kernel of an entry that was chosen for this device: every one of those was loaded.
    pub(super) fn function(&self, entry: Entry) -> &Function {
        &self.0.functions[&entry]
    }

    /// Brings lanes and page tables of jobs to the device, and decides their launches. Waits for the copy.
    ///
    /// # Errors
    /// `Layout` as [`kernels::launches`], or when a table has fewer entries than the jobs have pages; `Device` when there is no room.
    pub fn prepare(&self, stream: &Stream, jobs: &[Job], tables: &PageTables, wishes: Wishes) -> Result<Prepared> {
        let num_pages = jobs.iter().map(|job| job.num_pages).max().unwrap_or(0) as usize;
        let mut bytes: Vec<u8> = jobs
            .iter()
            .flat_map(|job| &job.lanes)
            .flat_map(Lane::to_bytes)
            .collect();
        let mut table = |pages: &Option<Vec<u32>>, parts: fn(&Job) -> u32| -> Result<Option<usize>> {
            let Some(pages) = pages else {
                return Ok(None);
            };
            let needed = jobs.iter().map(|job| job.num_pages.div_ceil(parts(job).max(1))).max();
            if pages.len() < needed.unwrap_or(0) as usize {
                let message = format!(
                    "a table of `{}` pages is short of `{}`",
                    pages.len(),
                    needed.unwrap_or(0)
                );
                return Err(Error::new(ErrorKind::Layout, "copy pages", message));
            }
            let offset = bytes.len();
            bytes.extend(pages.iter().flat_map(|page| page.to_ne_bytes()));
            Ok(Some(offset))
        };
        let src = table(&tables.src, |job| job.shape.src.parts)?;
        let dst = table(&tables.dst, |job| job.shape.dst.parts)?;
        let buffer = DeviceBuffer::new(self.context(), bytes.len())?;
        buffer.write(stream, 0, &bytes)?;
        let state = DeviceBuffer::new(self.context(), num_pages * 8 + 8)?;
        state.fill(stream, 0)?;
        let at = |offset: Option<usize>| offset.map_or(0, |offset| buffer.address() + offset as u64);
        let mut launches = Vec::new();
        let mut first_lane = 0;
        for job in jobs {
            for Launch {
                entry,
                grid,
                block,
                shared_bytes,
                first_lane: in_job,
                view,
            } in kernels::launches(job, self.facts(), wishes)?
            {
                let view = View {
                    lanes: buffer.address() + (first_lane + u64::from(in_job)) * size_of::<Lane>() as u64,
                    src_pages: at(src),
                    dst_pages: at(dst),
                    sums: state.address(),
                    arrived: state.address() + num_pages as u64 * 8,
                    ..view
                };
                let extent = Extent {
                    grid,
                    block,
                    shared_bytes,
                };
                launches.push((self.function(entry).clone(), extent, view));
            }
            first_lane += job.lanes.len() as u64;
        }
        Ok(Prepared {
            tables: buffer,
            state,
            num_pages,
            sums: wishes.sums,
            launches,
        })
    }
}

impl Prepared {
    /// Launches, in the order of the stream. Does not wait. With `flag`, the address of a word and a value for it, the word becomes
    /// the value after every byte is placed; with nothing to copy it is left alone.
    ///
    /// # Errors
    /// `Device` when the driver refuses. What fails later shows at the next call that waits for the stream.
    ///
    /// # Safety
    /// Until the stream has passed the launches: all pages of the jobs must be live memory that the device reaches, pages that are
    /// read must not be written, pages that are written must not be used, and the flag's word must be live, aligned, and written by nobody
    /// else. No other launch of this value may be under way, and this value must not be dropped.
    pub unsafe fn launch(&self, stream: &Stream, flag: Option<(u64, u64)>) -> Result<()> {
        if self.sums {
            self.state.fill(stream, 0)?;
        }
        for (number, (function, extent, view)) in self.launches.iter().enumerate() {
            let last = number + 1 == self.launches.len();
            let (address, value) = flag.filter(|_| last).unwrap_or_default();
            let view = View {
                flag: address,
                flag_value: value,
                ..*view
            };
            // SAFETY: the view points into our buffers and to what the caller vouches for.
            unsafe { function.launch(stream, *extent, &view.to_bytes()) }?;
        }
        Ok(())
    }

    /// Launches that a copy is.
    pub fn launch_count(&self) -> usize {
        self.launches.len()
    }

    /// Bytes on the device for tables and sums.
    pub fn memory_bytes(&self) -> usize {
        self.tables.len() + self.state.len()
    }

    /// The checksums of the pages after a launch. Waits for the stream.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    pub fn sums(&self, stream: &Stream) -> Result<Vec<u64>> {
        let mut bytes = vec![0; self.num_pages * 8];
        self.state.read(stream, 0, &mut bytes)?;
        let word = |chunk: &[u8]| chunk.try_into().map_or(0, u64::from_ne_bytes);
        Ok(bytes.chunks_exact(8).map(word).collect())
    }
}
