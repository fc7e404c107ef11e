"""What the public functions return: one read-only class per answer, with a typed attribute for each
field.

A report holds the document that the command of the same name prints with `--format json`;
`to_json()` gives that document. What each field means is written once, in its schema:
`schemas/<kind>.schema.json`.
"""

from __future__ import annotations

from ..core.errors import Diagnostic as Diagnostic
from .authoring import NewReport as NewReport
from .authoring import RuleFileCounts as RuleFileCounts
from .comparisons import BytesDifference as BytesDifference
from .comparisons import DiffReport as DiffReport
from .comparisons import SpecDifference as SpecDifference
from .comparisons import TensorFinding as TensorFinding
from .comparisons import VerifiedSample as VerifiedSample
from .comparisons import VerifyEstimate as VerifyEstimate
from .comparisons import VerifyReport as VerifyReport
from .histories import AppliedEdge as AppliedEdge
from .histories import DeclaredLayout as DeclaredLayout
from .histories import HistoryReport as HistoryReport
from .histories import LineageEdge as LineageEdge
from .histories import LineageLayout as LineageLayout
from .histories import LineageReport as LineageReport
from .histories import LineagesReport as LineagesReport
from .histories import OptimizerNames as OptimizerNames
from .histories import PackOrigin as PackOrigin
from .histories import StampedHash as StampedHash
from .histories import StampReport as StampReport
from .inspection import CarriedCount as CarriedCount
from .inspection import DetectedLayout as DetectedLayout
from .inspection import DtypeCount as DtypeCount
from .inspection import FormatGroup as FormatGroup
from .inspection import FormatReading as FormatReading
from .inspection import InspectReport as InspectReport
from .inspection import KeyGroup as KeyGroup
from .inspection import NearestLayout as NearestLayout
from .inspection import OutsideName as OutsideName
from .inspection import PlainGroup as PlainGroup
from .inspection import StoredObject as StoredObject
from .inspection import StoredPartSpec as StoredPartSpec
from .inspection import StoredValue as StoredValue
from .leftovers import CleanReport as CleanReport
from .leftovers import LeftUpload as LeftUpload
from .memory import LoadReport as LoadReport
from .memory import StateDictReport as StateDictReport
from .memory import TensorCounts as TensorCounts
from .plans import ChangedValue as ChangedValue
from .plans import FileState as FileState
from .plans import KeptHashes as KeptHashes
from .plans import KeyReport as KeyReport
from .plans import KeyStep as KeyStep
from .plans import KeyTensor as KeyTensor
from .plans import OutputOptions as OutputOptions
from .plans import PatchedFile as PatchedFile
from .plans import PlannedCheck as PlannedCheck
from .plans import PlannedFile as PlannedFile
from .plans import PlannedRow as PlannedRow
from .plans import PlannedSource as PlannedSource
from .plans import PlannedTarget as PlannedTarget
from .plans import PlanReport as PlanReport
from .plans import ReturningCodec as ReturningCodec
from .plans import RuleOrigin as RuleOrigin
from .plans import StoredOutput as StoredOutput
from .plans import UndoTensors as UndoTensors
from .rule_files import LintReport as LintReport
from .rule_files import RuleTestCheck as RuleTestCheck
from .rule_files import RuleTestCounts as RuleTestCounts
from .rule_files import RuleTestFile as RuleTestFile
from .rule_files import RuleTestReport as RuleTestReport
from .rule_files import SealedLineage as SealedLineage
from .rule_files import SealReport as SealReport
from .runs import ApplyReport as ApplyReport
from .runs import PartReport as PartReport
from .runs import RestoredTensors as RestoredTensors
from .runs import WrittenFile as WrittenFile
from .shared import AskedRequest as AskedRequest
from .shared import DocumentReport as DocumentReport
from .shared import DowngradeVerdict as DowngradeVerdict
from .shared import ErrorFigures as ErrorFigures
from .shared import ErrorReport as ErrorReport
from .shared import FileSize as FileSize
from .shared import LostKeys as LostKeys
from .shared import NotCompared as NotCompared
from .shared import PathEdge as PathEdge
from .shared import RuleErrors as RuleErrors
from .shared import RuleId as RuleId
from .shared import SideFileSize as SideFileSize
from .shared import TensorErrors as TensorErrors
